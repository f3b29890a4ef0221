"""Traffic that changes between easy and hard (Cascadia, fig. 11): a plan made again against static ones.

8B and 70B on 16 H100s; segments of 8, 16 and 10 minutes, from hard to easy as in the paper and the other way. Each
minute the last two are tested for drift; where the plan no longer fits, thresholds change. Aim: at least 1.3 times over
the static plan.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import numpy as np
from millrace.cascade.chain import NS
from millrace.cascade.sample import JudgedSample

from papers.cascadia.bench.cascade_models import h100_pair, has_data
from papers.cascadia.bench.cascade_slo import JUDGE_S, Setting, planner_of, rate_of
from papers.cascadia.bench.cascade_traces import NOTE, PAIR, trace, wildbench
from papers.cascadia.drift import DriftSettings, TrafficWindow, detect_drift
from papers.cascadia.planner import CascadeDesign, CascadePlanner
from papers.cascadia.timeline import Outcomes, Timeline, run_timeline

#: By order: (trace, minutes) of each segment, the paper's lengths.
ORDERS = {
    "hard to easy": (("hard", 8), ("mixed", 16), ("easy", 10)),
    "easy to hard": (("easy", 8), ("mixed", 16), ("hard", 10)),
}
CHECK_S, WINDOW_S, BIN_S = 60.0, 120.0, 6.0
QUALITY = 0.94
#: Judged requests of the last window that are planned on, at most.
JUDGED = 400


class Traffic(NamedTuple):
    """All requests, in order of arrival.

    Attributes:
        segment: (N,), index of the segment.
    """

    sample: JudgedSample
    arrivals_ns: list[int]
    segment: np.ndarray
    minutes: float


class Controlled(NamedTuple):
    """A timeline and how it came about."""

    timeline: Timeline
    thresholds: int
    alarms: int


def main() -> int:
    """Print a row per policy and seed, then the ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=list(ORDERS))
    options = parser.parse_args()
    if not has_data():
        print("cascade_drift: the published tables and scores are not here (MILLRACE_DATA)")
        return 0
    setting = Setting("8B and 70B on 16 H100", 16, h100_pair(), PAIR)
    print(f"{setting.name}; {NOTE.format(', '.join(PAIR))}")
    print(f"quality {QUALITY:.0%} of the 70B's")
    print("by segment: p95, and quality less what was asked for; the rate is the same in all")
    for order in options.orders:
        print(f"\n{order}\n{'seed':>4}  {'policy':<23}{'p95 s':>6}{'by segment':>18}{'quality':>18}  changes")
        ratios: dict[str, list[float]] = {}
        for seed in range(options.seeds):
            for name, value in _seed(setting, order, seed).items():
                ratios.setdefault(name, []).append(value)
        for name, values in ratios.items():
            told = f"{np.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"
            print(f"p95 of {name}: {told}", flush=True)
    return 0


def _seed(setting: Setting, order: str, seed: int) -> dict[str, float]:
    base = rate_of(setting, wildbench(seed, PAIR), seed)
    traffic = _traffic(base, order, seed)
    first = _planner(setting, traffic, 0.0, ORDERS[order][0][1] * 60.0, seed)
    average = _planner(setting, traffic, 0.0, traffic.minutes * 60.0, seed)
    statics = {"static, first segment": first.plan(), "static, all segments": average.plan()}
    start = statics["static, first segment"]
    assert start is not None, "the first segment can be served"
    replanned = _controlled(setting, traffic, start, seed)
    found = {"replanned": _judge(seed, "replanned", traffic, replanned)}
    for name, design in statics.items():
        if design is not None:
            found[name] = _judge(seed, name, traffic, Controlled(_static(design), 0, 0))
    others = {name: p95 for name, p95 in found.items() if name != "replanned"}
    return {f"{name} over the replanned one": p95 / found["replanned"] for name, p95 in others.items()}


def _traffic(rate: float, order: str, seed: int) -> Traffic:
    rng, parts = np.random.default_rng([seed, 5]), []
    rows, segments, begin = [], [], 0.0
    for index, (name, minutes) in enumerate(ORDERS[order]):
        sample, count = trace(name, seed, PAIR), rng.poisson(rate * minutes * 60)
        parts.append(begin + np.sort(rng.random(count)) * minutes * 60)
        rows.append(sample.rows(rng.integers(0, sample.count, count)))
        segments.append(np.full(count, index))
        begin += minutes * 60
    sample = JudgedSample(
        scores=np.concatenate([each.scores for each in rows]),
        quality=np.concatenate([each.quality for each in rows]),
        prompt_tokens=np.concatenate([each.prompt_tokens for each in rows]),
        output_tokens=np.concatenate([each.output_tokens for each in rows]),
    )
    arrivals = [int(at * NS) for at in np.concatenate(parts)]
    return Traffic(sample, arrivals, np.concatenate(segments), begin / 60)


def _within(traffic: Traffic, begin_s: float, end_s: float) -> np.ndarray:
    at = np.array(traffic.arrivals_ns)
    return np.flatnonzero((at >= begin_s * NS) & (at < end_s * NS))


def _planner(setting: Setting, traffic: Traffic, begin_s: float, end_s: float, seed: int) -> CascadePlanner:
    """Plans for what arrived in an interval, from a share of it that was judged on both models."""
    rows = _within(traffic, begin_s, end_s)
    rate = len(rows) / (end_s - begin_s)
    if len(rows) > JUDGED:
        rows = np.sort(np.random.default_rng([seed, int(begin_s)]).choice(rows, JUDGED, replace=False))
    sample = traffic.sample.rows(rows)
    return planner_of(setting, sample, rate, QUALITY * float(sample.quality[:, -1].mean()), seed)


def _window(traffic: Traffic, begin_s: float, end_s: float) -> TrafficWindow:
    rows = _within(traffic, begin_s, end_s)
    at = np.array(traffic.arrivals_ns)[rows] / NS
    counts, _ = np.histogram(at, bins=int((end_s - begin_s) / BIN_S), range=(begin_s, end_s))
    return TrafficWindow(
        counts=counts.tolist(),
        prompt_tokens=traffic.sample.prompt_tokens[rows, 0],
        output_tokens=traffic.sample.output_tokens[rows, 0],
        scores=(traffic.sample.scores[rows, 0],),
    )


def _controlled(setting: Setting, traffic: Traffic, start: CascadeDesign, seed: int) -> Controlled:
    """Checks each minute, as a coordinator does; it sees arrivals, lengths and scores, and no latency."""
    in_force, thresholds = start.routed.thresholds, [(0, start.routed.thresholds)]
    planned = _window(traffic, 0.0, WINDOW_S)
    alarms = 0
    settings = DriftSettings(interval_s=CHECK_S)
    for now_s in np.arange(2 * WINDOW_S, traffic.minutes * 60.0, CHECK_S).tolist():
        current = _window(traffic, now_s - WINDOW_S, now_s)
        if not detect_drift(planned, current, settings):
            continue
        alarms += 1
        planner = _planner(setting, traffic, now_s - WINDOW_S, now_s, seed)
        found = planner.thresholds_on(start.deployments).choose(in_force)
        planned = current
        if found.design is not None and not found.kept:
            in_force = found.design.routed.thresholds
            thresholds.append((int(now_s * NS), in_force))
    timeline = Timeline(tiers=start.deployments, thresholds=thresholds, judge_s=(JUDGE_S,))
    return Controlled(timeline, len(thresholds) - 1, alarms)


def _static(design: CascadeDesign) -> Timeline:
    return Timeline(tiers=design.deployments, thresholds=[(0, design.routed.thresholds)], judge_s=(JUDGE_S,))


def _judge(seed: int, name: str, traffic: Traffic, controlled: Controlled) -> float:
    """Print a row; the p95 over all requests."""
    outcomes = run_timeline(traffic.sample, traffic.arrivals_ns, controlled.timeline)
    p95 = float(np.percentile(outcomes.latency_s, 95))
    segments = range(int(traffic.segment.max()) + 1)
    by_segment = " ".join(f"{np.percentile(outcomes.latency_s[traffic.segment == each], 95):.1f}" for each in segments)
    less = " ".join(f"{_less(traffic, outcomes, each):+.1f}" for each in segments)
    told = f"{controlled.thresholds} of thresholds, {controlled.alarms} alarms"
    print(f"{seed:>4}  {name:<23}{p95:>6.1f}{by_segment:>18}{less:>18}  {told}", flush=True)
    return p95


def _less(traffic: Traffic, outcomes: Outcomes, segment: int) -> float:
    """Quality of a segment less what was asked for."""
    mask = traffic.segment == segment
    return float(outcomes.quality[mask].mean() - QUALITY * traffic.sample.quality[mask, -1].mean())
