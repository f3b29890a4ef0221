"""Alarms of the coordinator's tests of drift: false ones of stationary traffic, and time until a real change is found.

The coordinator's own state and tests, fed with finished requests of nano, the first tier, as they were recorded:
lengths, scores, and ends that come later for long answers. Aim: at most one false alarm a day.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from millrace.cascade.sample import Floats, Integers
from millrace.contracts.cascade import CascadePlan, CascadeTier
from millrace.contracts.observers import CascadeAttempt, RequestFinished
from millrace.judging.files import CONFIDENCE_FILE, read_judge

from bench.judged.answers import MODELS, recorded
from bench.judged.record import ROOT
from services.coordinator.cascade_config import CoordinatedCascade, CoordinatedTier
from services.coordinator.cascade_planning import NS, CascadeState, take_outcome, why_plan

DAY_S = 86_400.0
PERIOD_S = 60.0
#: Of an answer: until its first token, and each token.
FIRST_S, TOKEN_S = 0.3, 0.03
#: Bursty arrivals: the rate is drawn anew so often, with this shape of a gamma distribution.
BURST_S, BURST_SHAPE = 5.0, 2.0
#: A change begins then, and is looked for until then.
CHANGE_S, SEARCH_S = 7_200.0, 7_200.0
#: Tasks whose answers are long or mostly wrong.
HARD = ("count", "words", "sort", "encode", "lines", "collatz")


class Rows(NamedTuple):
    """Lengths and scores that requests are drawn from."""

    prompt_tokens: Integers
    output_tokens: Integers
    scores: Floats


class Traffic(NamedTuple):
    """Finished requests by rising end, seconds."""

    arrival_s: Floats
    end_s: Floats
    rows: Integers


def main() -> int:
    """Print a row per rate and kind of arrivals, then one per change."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--days", type=int, default=30)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.2, 1.0, 4.0])
    parser.add_argument("--seeds", type=int, default=10, help="for each change")
    options = parser.parse_args()
    everything = _rows(np.ones(len(recorded().prompts), dtype=np.bool_))
    hard = _rows(np.isin(recorded().tasks, HARD))
    print(
        f"stationary, {options.days} days each; a look each {PERIOD_S:g} s\n{'rate/s':>7}  {'arrivals':<9}alarms a day"
    )
    for rate in options.rates:
        for name in ("poisson", "bursty"):
            found = [_stationary(everything, rate, name, day) for day in range(options.days)]
            kinds = ", ".join(sorted({why.split(" ")[0] for day in found for why in day})) or "none"
            print(f"{rate:>7g}  {name:<9}{sum(map(len, found)) / options.days:<6.2f} of: {kinds}", flush=True)
    print(f"\na change, {options.seeds} runs each, poisson: found in so many, after minutes (median)")
    changes: dict[str, Callable[[float], tuple[Rows, float]]] = {
        "rate +30 %": lambda rate: (everything, 1.3 * rate),
        "rate +100 %": lambda rate: (everything, 2.0 * rate),
        "harder prompts": lambda rate: (hard, rate),
    }
    for rate in options.rates:
        for name, change in changes.items():
            minutes = [each for seed in range(options.seeds) if (each := _changed(everything, change, rate, seed))]
            median = f"{np.median(minutes):.0f}" if minutes else "-"
            print(f"{rate:>7g}  {name:<16}{len(minutes):>3} of {options.seeds}{median:>6}", flush=True)
    return 0


def _rows(chosen: np.ndarray) -> Rows:
    judge, answers = read_judge(ROOT / "models" / MODELS[0] / CONFIDENCE_FILE), recorded()
    scores = np.array([judge.score(logprobs) or 0.0 for logprobs in answers.logprobs[0]])
    return Rows(answers.prompt_tokens[chosen], answers.output_tokens[chosen, 0], scores[chosen])


def _state() -> CascadeState:
    tiers = [CoordinatedTier(model=model) for model in MODELS]
    config = CoordinatedCascade(name="auto", tiers=tiers, quality=80.0, sample="recorded", period_s=PERIOD_S)
    state = CascadeState(config)
    planned = [CascadeTier(model=model, threshold=70.0, instances=1) for model in MODELS]
    state.plan = CascadePlan(cascade="auto", epoch=1, tiers=planned, judge="confidence", quality=80.0)
    state.planned_empty = []
    return state


def _stationary(rows: Rows, rate: float, arrivals: str, day: int) -> list[str]:
    """The alarms of one day."""
    rng = np.random.default_rng([day, round(1000 * rate), arrivals == "bursty"])
    traffic = _traffic(rng, rows, rate, DAY_S, bursty=arrivals == "bursty")
    return [why for _, why in _alarms(_state(), [(rows, traffic)], DAY_S)]


def _changed(rows: Rows, change: Callable[[float], tuple[Rows, float]], rate: float, seed: int) -> float | None:
    """Minutes from a change to the first alarm after it; None where there is none."""
    rng = np.random.default_rng([seed, round(1000 * rate), 9])
    then, then_rate = change(rate)
    before = _traffic(rng, rows, rate, CHANGE_S)
    after = _traffic(rng, then, then_rate, SEARCH_S)
    after = Traffic(after.arrival_s + CHANGE_S, after.end_s + CHANGE_S, after.rows)
    for at_s, _ in _alarms(_state(), [(rows, before), (then, after)], CHANGE_S + SEARCH_S):
        if at_s > CHANGE_S:
            return (at_s - CHANGE_S) / 60
    return None


def _traffic(rng: np.random.Generator, rows: Rows, rate: float, span_s: float, *, bursty: bool = False) -> Traffic:
    rates = np.full(int(span_s / BURST_S), rate)
    if bursty:
        rates = rng.gamma(BURST_SHAPE, rate / BURST_SHAPE, len(rates))
    counts = rng.poisson(rates * BURST_S)
    arrival_s = np.sort((np.repeat(np.arange(len(counts)), counts) + rng.random(int(counts.sum()))) * BURST_S)
    chosen = rng.integers(0, len(rows.scores), len(arrival_s))
    end_s = arrival_s + FIRST_S + TOKEN_S * rows.output_tokens[chosen]
    order = np.argsort(end_s, kind="stable")
    return Traffic(arrival_s[order], end_s[order], chosen[order])


def _alarms(state: CascadeState, parts: list[tuple[Rows, Traffic]], until_s: float) -> Iterator[tuple[float, str]]:
    """Time and reason of each alarm; after it the plan is kept, as after a planner that found no better one."""
    finished = [_finished(rows, traffic, index) for rows, traffic in parts for index in range(len(traffic.rows))]
    finished.sort(key=lambda each: each[0])
    position = 0
    for now_s in np.arange(PERIOD_S, until_s, PERIOD_S).tolist():
        while position < len(finished) and finished[position][0] <= now_s:
            take_outcome(state, finished[position][1])
            position += 1
        now_ns = int(now_s * NS)
        if why := why_plan(state, now_ns):
            yield now_s, why
            state.planned_ns, state.baseline, state.since_ns = now_ns, None, now_ns


def _finished(rows: Rows, traffic: Traffic, index: int) -> tuple[float, RequestFinished]:
    row, at_ns = traffic.rows[index], int(traffic.arrival_s[index] * NS)
    attempt = CascadeAttempt(
        request="r~1",
        tier=0,
        model=MODELS[0],
        outcome="delivered",
        score=float(rows.scores[row]),
        output_tokens=int(rows.output_tokens[row]),
    )
    body = RequestFinished(
        request="r",
        model="auto",
        outcome="completed",
        ingress="ingress-0",
        arrival_ns=at_ns,
        e2e_ns=int(traffic.end_s[index] * NS) - at_ns,
        prompt_tokens=int(rows.prompt_tokens[row]),
        output_tokens=[attempt.output_tokens],
        attempts=[attempt],
    )
    return float(traffic.end_s[index]), body


if __name__ == "__main__":
    raise SystemExit(main())
