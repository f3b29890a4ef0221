"""Input of a role policy: windows of summaries per instance, and the requests of each stage.

All of it is bounded: samples by time and number, instances to those registered, requests by number.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping

import msgspec
from millrace.contracts.broker import LoadReported
from millrace.contracts.observers import DecisionMade, RequestFinished
from millrace.contracts.status import InstanceRecord, InstanceSummary, ServicePresence
from millrace.policies.roles import Demand
from millrace.policies.roles.indicators import (
    Indicators,
    InstanceLimits,
    LoadSample,
    indicators_of,
    sample_of,
)
from millrace.policies.stages.instance import InstanceModel

#: Least time between two samples of an instance: ten in a window of 2.5 s smooth single steps.
SAMPLE_NS = 250_000_000

#: Samples per instance, and requests per model, that are kept.
SAMPLES_MAX = 64
REQUESTS_MAX = 4096

#: Mean output until a request has ended, tokens.
OUTPUT_TOKENS = 200.0

#: What migrators and brokers told of moves is believed for so long; they tell it every second, or twice a second.
MOVES_NS = 2_500_000_000


class PlacedPrompt(msgspec.Struct, frozen=True, array_like=True):
    """One request when it was placed: unix ns, instance, prompt tokens."""

    at_ns: int
    instance: str
    prompt_tokens: int


class InstanceWindow:
    """One incarnation of an instance."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.samples: deque[LoadSample] = deque(maxlen=SAMPLES_MAX)

    def add(self, sample: LoadSample) -> None:
        """Keep a sample, unless the last one is fresh: then it is replaced where it is not the only one."""
        if len(self.samples) > 1 and sample.at_ns - self.samples[-2].at_ns < SAMPLE_NS:
            self.samples.pop()
        self.samples.append(sample)

    def since(self, at_ns: int) -> list[LoadSample]:
        """Samples that are not older."""
        return [sample for sample in self.samples if sample.at_ns >= at_ns]


class RoleWindows:
    """Sole owner of what was heard about loads.

    Attributes:
        ignored: Absurd indicators (negative, NaN), by instance.
    """

    def __init__(self, *, window_ns: int, demand_ns: int) -> None:
        self.ignored: Counter[str] = Counter()
        self._window_ns = window_ns
        self._demand_ns = demand_ns
        self._instances: dict[str, InstanceWindow] = {}
        self._moves: dict[tuple[str, str], tuple[int, int]] = {}  # (teller, instance): (heard, sequences)
        self._arrivals: dict[str, deque[PlacedPrompt]] = {}
        self._ended: dict[str, deque[tuple[int, int, int]]] = {}  # (prompt, cached, output) per request

    # inputs

    def on_summary(self, body: InstanceSummary) -> None:
        """A sample of an instance; absurd ones are counted and ignored."""
        if body.indicators is None:
            return
        sample = sample_of(body)
        if sample is None:
            self.ignored[body.instance] += 1
            return
        window = self._instances.get(body.instance)
        if window is None or window.incarnation != body.incarnation:
            window = self._instances[body.instance] = InstanceWindow(body.incarnation)
        if not window.samples or sample.at_ns > window.samples[-1].at_ns:
            window.add(sample)

    def on_migrator(self, body: ServicePresence, now_ns: int) -> None:
        """Take the number of sequences that leave and arrive at each instance."""
        told = Counter({each.instance: each.leaving for each in body.moving})
        told.update(each.target for each in body.migrations if each.target)
        known = [name for teller, name in self._moves if teller == body.name]
        for name in known:
            if name not in told:
                del self._moves[body.name, name]
        self._moves |= {(body.name, name): (now_ns, count) for name, count in told.items() if name in self._instances}

    def on_load(self, body: LoadReported, now_ns: int) -> None:
        """Deals of an instance, as its broker tells them."""
        if body.instance in self._instances:
            count = body.outgoing + body.incoming + (body.queued_tokens > 0)
            self._moves["broker", body.instance] = (now_ns, max(0, count))

    def on_decision(self, body: DecisionMade, now_ns: int) -> None:
        """A request was placed."""
        if body.kind == "dispatch" and body.chosen and body.prompt_tokens > 0:
            arrivals = self._arrivals.setdefault(body.model, deque(maxlen=REQUESTS_MAX))
            arrivals.append(PlacedPrompt(now_ns, body.chosen, body.prompt_tokens))

    def on_outcome(self, body: RequestFinished) -> None:
        """A request ended: its lengths."""
        if body.outcome == "completed" and body.prompt_tokens > 0:
            ended = self._ended.setdefault(body.model, deque(maxlen=256))
            ended.append((body.prompt_tokens, body.cached_tokens, sum(body.output_tokens)))

    def keep(self, instances: Collection[str]) -> None:
        """Forget instances that are not registered any more."""
        self._instances = {name: window for name, window in self._instances.items() if name in instances}
        self._moves = {key: told for key, told in self._moves.items() if key[1] in instances}

    def forget(self, model: str) -> None:
        """Drop the requests of a model."""
        self._arrivals.pop(model, None)
        self._ended.pop(model, None)

    # what follows

    def heard(self, instance: str, now_ns: int) -> bool:
        """Whether a sample came within the window."""
        window = self._instances.get(instance)
        return window is not None and bool(window.since(now_ns - self._window_ns))

    def indicators(self, record: InstanceRecord, model: InstanceModel | None, now_ns: int) -> Indicators:
        """Of an instance over the window."""
        window = self._instances.get(record.instance)
        samples = window.since(now_ns - self._window_ns) if window is not None else []
        limits = InstanceLimits(max_sequences=record.max_sequences, token_budget=record.token_budget)
        return indicators_of(samples, limits, model)

    def open_moves(self, instance: str, now_ns: int) -> int:
        """Sequences on their way from or to an instance, and deals about them."""
        told = [
            count for (_, name), (at_ns, count) in self._moves.items() if name == instance and now_ns - at_ns < MOVES_NS
        ]
        window = self._instances.get(instance)
        if window is not None and window.samples:
            load = window.samples[-1].load
            told.append(load.prefill.moving + load.decode.moving)
        return max(told, default=0)

    def decoding(self, instance: str) -> int:
        """Sequences that decode there, as last told; 0 where nothing was."""
        window = self._instances.get(instance)
        return window.samples[-1].load.decode.running if window is not None and window.samples else 0

    def demand(self, model: str, instances: Collection[str], now_ns: int) -> Demand:
        """Requests that came to some instances."""
        arrivals = self._arrivals.get(model, ())
        recent = [a for a in arrivals if a.instance in instances and now_ns - a.at_ns < self._demand_ns]
        ended = self._ended.get(model, ())
        prompts, cached = sum(e[0] for e in ended), sum(e[1] for e in ended)
        fresh = 1 - min(1.0, cached / prompts) if prompts else 1.0
        outputs = [e[2] for e in ended]
        prompt = (
            sum(a.prompt_tokens for a in recent) / len(recent) if recent else (prompts / len(ended) if ended else 0.0)
        )
        return Demand(
            requests_per_s=len(recent) / (self._demand_ns / 1e9),
            prompt_tokens=prompt * fresh,
            output_tokens=sum(outputs) / len(outputs) if outputs else OUTPUT_TOKENS,
        )

    def check(self, registered: Mapping[str, object] | None = None) -> None:
        """Raises AssertionError where a bound does not hold."""
        assert all(len(window.samples) <= SAMPLES_MAX for window in self._instances.values())
        if registered is not None:
            assert set(self._instances) <= set(registered), "windows of instances that are not registered"
