"""Decoding instances under rescheduling, without messages: loads that grow, move and end, once a second.

The state of each instance is its sequences' lengths. In a tick each decodes as many tokens as its instance's steps
allow by the step-time set, sequences end at their known lengths, new ones come, and the policy of central ARES
(`papers/ares/rescheduling.py`) moves some. Nothing is preempted and no load is stale: it shows what a rule makes of
loads at hundreds of instances; whole clusters show the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import msgspec
import numpy as np
from millrace.contracts.status import BatchComposition
from millrace.enginemodel.step_cost import FS_PER_NS, StepCost
from millrace.workloads.lengths import Lengths
from numpy.typing import NDArray

from papers.ares.rescheduling import DecodeInstance, Parameters, decide

Numbers = NDArray[np.float64]

TICK_S = 1.0
#: Points of the horizon; ARES does not say how many.
POINTS, HORIZON_S = 17, 60.0


class FleetShape(msgspec.Struct, frozen=True, kw_only=True):
    """A run.

    Attributes:
        count: Instances.
        rate_per_s: Arrivals per instance.
        output_scale: Factor on the lengths of outputs and prompts.
        rule: ``none``, ``reactive`` (present loads only) or ``ares`` (exact rests).
        moves_max: Per second, of all instances; the paper makes one.
        seconds: Of arrivals; the second half counts.
        capacity_tokens: KV of an instance.
        token_bytes, gbps: Of a move.
    """

    count: int
    rate_per_s: float
    output_scale: float = 1.0
    rule: str = "none"
    moves_max: int = 1
    seconds: int = 1_200
    capacity_tokens: int = 216_000
    token_bytes: int = 57_344
    gbps: float = 25.0
    seed: int = 0


class FleetOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the second half of a run.

    Attributes:
        running: Sequences per instance.
        load: Tokens per instance.
        variance: Of the tokens over instances.
        step_variance: Of the step times over instances, ms squared.
        tpot_ms, tpot_p99_ms: Of the tokens decoded: mean, and the step time that one in a hundred exceeds.
        length_cv: Coefficient of variation of the lengths of those running.
        moves_per_s: Of one instance.
        overfull: Share of instance-seconds with more tokens than the capacity.
    """

    running: float
    load: float
    variance: float
    step_variance: float
    tpot_ms: float
    tpot_p99_ms: float
    length_cv: float
    moves_per_s: float
    overfull: float


@dataclass(kw_only=True)
class _Sums:
    ticks: int = 0
    values: dict[str, float] = field(default_factory=dict)
    step_ms: list[Numbers] = field(default_factory=list)
    decoded: list[Numbers] = field(default_factory=list)

    def add(self, **found: float) -> None:
        self.ticks += 1
        for name, value in found.items():
            self.values[name] = self.values.get(name, 0.0) + value

    def mean(self, name: str) -> float:
        return self.values.get(name, 0.0) / max(1, self.ticks)


class Fleet:
    """Sequences as parallel arrays: instance, length now, length at the end."""

    def __init__(self, shape: FleetShape, cost: StepCost, lengths: Lengths) -> None:
        self._shape, self._cost, self._lengths = shape, cost, lengths
        self._rng = Random(f"{shape.seed}/fleet")
        self._at = np.empty(0, np.int64)
        self._length = np.empty(0)
        self._final = np.empty(0)
        self._moves = 0
        self._parameters = Parameters(moves_max=shape.moves_max)

    def run(self) -> FleetOutcome:
        """Runs it to its end."""
        sums = _Sums()
        arrivals = self._arrivals()
        upcoming = next(arrivals)
        for tick in range(self._shape.seconds):
            while upcoming <= tick * TICK_S:
                self._arrive()
                upcoming = next(arrivals)
            steps_ms = self._steps_ms()
            if tick == self._shape.seconds // 2:
                self._moves = 0
            if tick >= self._shape.seconds // 2:
                self._note(sums, steps_ms)
            self._decode(steps_ms)
            if self._shape.rule != "none":
                self._reschedule(steps_ms)
        return self._outcome(sums)

    def _arrivals(self) -> Iterator[float]:
        at = 0.0
        while True:
            at += self._rng.expovariate(self._shape.rate_per_s * self._shape.count)
            yield at

    def _arrive(self) -> None:
        """To an instance drawn at random: what dispatch cannot know of lengths."""
        drawn = self._lengths.draw(self._rng)
        prompt, output = (max(1.0, n * self._shape.output_scale) for n in (drawn.prompt_tokens, drawn.output_tokens))
        self._at = np.append(self._at, self._rng.randrange(self._shape.count))
        self._length = np.append(self._length, prompt)
        self._final = np.append(self._final, prompt + output)

    def _steps_ms(self) -> Numbers:
        running = np.bincount(self._at, minlength=self._shape.count)
        loads = self._loads()
        return np.array([self._step_ms(int(n), float(t)) for n, t in zip(running, loads, strict=True)])

    def _step_ms(self, running: int, tokens: float) -> float:
        batch = BatchComposition(
            decodes=max(1, running), context_tokens=round(tokens), longest_context=round(tokens / max(1, running))
        )
        return self._cost.duration_fs(batch) / FS_PER_NS / 1e6

    def _loads(self) -> Numbers:
        return np.asarray(np.bincount(self._at, weights=self._length, minlength=self._shape.count), np.float64)

    def _decode(self, steps_ms: Numbers) -> None:
        self._length = self._length + TICK_S * 1e3 / steps_ms[self._at]
        goes_on = self._length < self._final
        self._at, self._length, self._final = self._at[goes_on], self._length[goes_on], self._final[goes_on]

    def _reschedule(self, steps_ms: Numbers) -> None:
        """A move is done by the next second: 50,000 tokens of KV take 0.9 s at 25 Gb/s."""
        rows = [np.flatnonzero(self._at == index) for index in range(self._shape.count)]
        views = tuple(self._view(index, own, float(steps_ms[index])) for index, own in enumerate(rows))
        for move in decide(views, self._parameters).moves:
            self._at[int(move.request)] = int(move.target)
            self._moves += 1

    def _view(self, index: int, own: NDArray[np.int64], step_ms: float) -> DecodeInstance:
        length, rests = self._length[own], self._final[own] - self._length[own]
        ahead = np.linspace(0.0, HORIZON_S, POINTS) * 1e3 / step_ms
        mean = float(length.mean()) if len(own) else 0.0
        move_ms = 8e-6 * mean * self._shape.token_bytes / self._shape.gbps
        if self._shape.rule == "reactive":  # the present, and every sequence outlasts a move
            ahead, rests = np.zeros(2), np.full(len(own), 1 + move_ms / step_ms)
        tokens = np.where(ahead < rests[:, None], length[:, None] + ahead, 0.0)
        return DecodeInstance(
            name=str(index),
            tokens=tokens.sum(axis=0),
            requests=tuple(map(str, own)),
            of_requests=tokens,
            rests=rests,
            capacity_tokens=self._shape.capacity_tokens,
            step_ns=max(1, round(step_ms * 1e6)),
            move_ns=round(move_ms * 1e6),
        )

    def _note(self, sums: _Sums, steps_ms: Numbers) -> None:
        loads = self._loads()
        count = len(self._length)
        cv = float(self._length.std() / self._length.mean()) if count > 1 else 0.0
        sums.add(
            running=count / self._shape.count,
            load=float(loads.mean()),
            variance=float(loads.var()),
            step_variance=float(steps_ms.var()),
            length_cv=cv,
            overfull=float((loads > self._shape.capacity_tokens).mean()),
        )
        sums.step_ms.append(steps_ms[self._at])
        sums.decoded.append(1.0 / steps_ms[self._at])

    def _outcome(self, sums: _Sums) -> FleetOutcome:
        times = np.concatenate(sums.step_ms) if sums.step_ms else np.zeros(1)
        weights = np.concatenate(sums.decoded) if sums.decoded else np.ones(1)
        return FleetOutcome(
            running=sums.mean("running"),
            load=sums.mean("load"),
            variance=sums.mean("variance"),
            step_variance=sums.mean("step_variance"),
            tpot_ms=float((times * weights).sum() / weights.sum()),
            tpot_p99_ms=weighted_quantile(times, weights, 0.99),
            length_cv=sums.mean("length_cv"),
            moves_per_s=self._moves / (self._shape.seconds - self._shape.seconds // 2) / self._shape.count,
            overfull=sums.mean("overfull"),
        )


def weighted_quantile(values: Numbers, weights: Numbers, share: float) -> float:
    """The least value below which this share of the weight lies."""
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order][min(len(order) - 1, int(np.searchsorted(total, share * total[-1])))])


def random_placement_cv(outcomes: Sequence[FleetOutcome]) -> float:
    """Coefficient of variation of loads with n sequences placed at random: sqrt((1 + c²) / n)."""
    return float(np.mean([((1 + each.length_cv**2) / each.running) ** 0.5 for each in outcomes]))
