"""Figures of replays: latencies with intervals, against the recording and against each other, and why they differ.

Intervals are a bootstrap over slices of the load's time: neighbouring requests share queues and are drawn together.
Both sides of a comparison are drawn alike, request for request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from millrace.policies.objectives import Objectives
from millrace.workloads.recording import RequestServed

from simulator.scenarios.observer import FinishedRequest
from simulator.whatif.replaying import Replayed

#: Latencies and their figures.
LATENCIES = ("ttft", "tpot", "e2e")
QUANTILES = {"p50": 0.5, "p99": 0.99}
STATISTICS = (*QUANTILES, "mean")

#: Slices of the load's time, and draws of them.
SLICES = 40
DRAWS = 300

#: A change below this share is none.
SMALL = 0.02
_SAME = "times to the first token and per further token stay within 2 % on average"

Floats = npt.NDArray[np.float64]


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies of requests, ms; nan where there is none. Rows are requests, in order of arrival.

    Attributes:
        ttft, tpot, e2e: As reported.
        cached: Prompt tokens found in a prefix cache.
    """

    ttft: Floats
    tpot: Floats
    e2e: Floats
    cached: Floats

    def part(self, mask: npt.NDArray[np.bool_]) -> Latencies:
        return Latencies(ttft=self.ttft[mask], tpot=self.tpot[mask], e2e=self.e2e[mask], cached=self.cached[mask])


class ComparedFigure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure on two sides.

    Attributes:
        before, after: ms.
        ratio: After over before, with its 95 % interval.
    """

    before: float
    after: float
    ratio: float
    low: float
    high: float


class ComparedShare(msgspec.Struct, frozen=True, kw_only=True):
    """The share of requests within the objectives on two sides.

    Attributes:
        low, high: 95 % interval of the second less the first.
    """

    before: float
    after: float
    low: float
    high: float


def of_recording(served: Sequence[RequestServed]) -> Latencies:
    """As recorded."""
    done = [row if row.outcome == "completed" and row.ttft_ns >= 0 else None for row in served]
    return Latencies(
        ttft=_column(None if row is None else row.ttft_ns / 1e6 for row in done),
        tpot=_column(None if row is None else row.tpot_ns / 1e6 for row in done),
        e2e=_column(None if row is None else row.e2e_ns / 1e6 for row in done),
        cached=_column(None if row is None else float(row.cached) for row in done),
    )


def of_replay(replayed: Replayed, count: int) -> Latencies:
    """As simulated. ``count``: requests of the load."""
    done = [replayed.finished.get(number) for number in range(count)]
    return Latencies(
        ttft=_column(None if each is None else each.ttft_ns / 1e6 for each in done),
        tpot=_column(None if each is None else _tpot_ms(each) for each in done),
        e2e=_column(None if each is None else each.e2e_ns / 1e6 for each in done),
        cached=_column(None if each is None else float(each.cached_tokens) for each in done),
    )


def _tpot_ms(each: FinishedRequest) -> float:
    return (each.e2e_ns - each.ttft_ns) / (each.output_tokens - 1) / 1e6 if each.output_tokens > 1 else math.nan


def _column(values: object) -> Floats:
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)  # type: ignore[attr-defined]


def compared(before: Latencies, after: Latencies) -> dict[str, ComparedFigure]:
    """Each figure of both, by its name: ``ttft_p50`` and so on. Requests that one side has not are left out."""
    both = ~(np.isnan(before.e2e) | np.isnan(after.e2e))
    before, after = before.part(both), after.part(both)
    draws = _draws(len(before.e2e))
    found = {}
    for name in LATENCIES:
        old, new = getattr(before, name), getattr(after, name)
        was, now = _statistics(old), _statistics(new)
        ratios = np.array([_statistics(new[draw]) / _statistics(old[draw]) for draw in draws])
        for place, statistic in enumerate(STATISTICS):
            low, high = np.nanpercentile(ratios[:, place], (2.5, 97.5)) if len(old) else (math.nan, math.nan)
            found[f"{name}_{statistic}"] = ComparedFigure(
                before=float(was[place]),
                after=float(now[place]),
                ratio=float(now[place] / was[place]),
                low=float(low),
                high=float(high),
            )
    return found


def compared_shares(before: Latencies, after: Latencies, objectives: Objectives) -> ComparedShare:
    """Shares of all requests, those that did not complete included."""
    was, now = kept_objectives(before, objectives), kept_objectives(after, objectives)
    gains = now.astype(np.float64) - was
    low, high = np.percentile([gains[draw].mean() for draw in _draws(len(gains))], (2.5, 97.5))
    return ComparedShare(before=float(was.mean()), after=float(now.mean()), low=float(low), high=float(high))


def ratios(figures: Mapping[str, ComparedFigure], share: ComparedShare | None) -> dict[str, float]:
    """Those of figures that both sides have, by name, and the share's gain (``within``)."""
    found = {name: each.ratio for name, each in figures.items() if 0 < each.ratio < math.inf}
    return found if share is None else found | {"within": share.after - share.before}


def kept_objectives(latencies: Latencies, objectives: Objectives) -> npt.NDArray[np.bool_]:
    """Of each request, whether it completed within both."""
    late = (latencies.ttft > objectives.ttft_ms) | (latencies.tpot > objectives.tpot_ms)
    return ~(np.isnan(latencies.e2e) | late)


def _draws(count: int) -> list[npt.NDArray[np.int64]]:
    """Places of so many requests, drawn by slices; always the same ones."""
    slices = np.array_split(np.arange(count), min(SLICES, max(1, count // 5)))
    rng = np.random.default_rng(0)
    return [np.concatenate([slices[i] for i in rng.integers(0, len(slices), len(slices))]) for _ in range(DRAWS)]


def _statistics(values: Floats) -> Floats:
    """Those of STATISTICS."""
    values = values[~np.isnan(values)]
    if not len(values):
        return np.full(len(STATISTICS), math.nan)
    return np.append(np.quantile(values, list(QUANTILES.values())), values.mean())


def reason(prompts: Floats, before: Latencies, after: Latencies, replays: tuple[Replayed, Replayed]) -> str:
    """One sentence: which requests got faster or slower, and whether by queues, batches or caches.

    Args:
        replays: Before and after.
    """
    was, now = replays
    both = ~(np.isnan(before.e2e) | np.isnan(after.e2e))
    if not both.any():
        return "No request completed."
    split = float(np.median(prompts[both]))
    classes = {"all requests": both}
    if (prompts[both] > split).any():
        classes = {
            f"prompts over {split:.0f} tokens": both & (prompts > split),
            "shorter ones": both & (prompts <= split),
        }
    changes = {who: _mean_ratio(before.ttft[mask], after.ttft[mask]) for who, mask in classes.items()}
    parts = [_first_tokens(changes), _pace(before.tpot[both], after.tpot[both])]
    why = _causes(was, now, before.cached[both], after.cached[both])
    text = " and ".join(part for part in parts if part) or _SAME
    lost = f"; {now.lost - was.lost} more requests are not served" if now.lost > was.lost else ""
    return f"{text}{lost}: {why}." if why and any(parts) else f"{text}{lost}."


def _mean_ratio(old: Floats, new: Floats) -> float:
    return float(np.nanmean(new) / np.nanmean(old) - 1)


def _first_tokens(changes: Mapping[str, float]) -> str:
    """Changes of the mean time to the first token, by class of prompts."""
    told = {who: _more(change, "later", "earlier") for who, change in changes.items() if abs(change) >= SMALL}
    if not told:
        return ""
    spread = max(changes.values()) - min(changes.values())
    if len(told) == len(changes) and (len(changes) == 1 or spread < 0.25 * max(map(abs, changes.values()))):
        overall = sum(changes.values()) / len(changes)
        return f"first tokens come {_more(overall, 'later', 'earlier')} on average, whatever the prompt"
    return "first tokens of " + ", of ".join(f"{who} come {told.get(who, 'as before')}" for who in changes)


def _pace(old: Floats, new: Floats) -> str:
    change = _mean_ratio(old, new)
    return f"further tokens come {_more(change, 'more slowly', 'faster')}" if abs(change) >= SMALL else ""


def _more(change: float, more: str, less: str) -> str:
    return f"{abs(change):.0%} {more if change > 0 else less}"


def _causes(was: Replayed, now: Replayed, cached: Floats, cached_now: Floats) -> str:
    """Differences of the cluster's state, the largest first."""
    causes: list[tuple[float, str]] = []
    if abs(now.waiting - was.waiting) >= 0.1:
        size = abs(now.waiting - was.waiting) / max(0.1, was.waiting)
        causes.append((size, f"queues hold {now.waiting:.1f} requests on average ({was.waiting:.1f} before)"))
    if was.batch and abs(now.batch / was.batch - 1) >= SMALL:
        causes.append((abs(now.batch / was.batch - 1), f"batches of {now.batch:.1f} requests ({was.batch:.1f} before)"))
    hits, hits_now = float(np.nanmean(cached)), float(np.nanmean(cached_now))
    if abs(hits_now - hits) >= 1 and abs(hits_now - hits) >= SMALL * max(hits, 1):
        causes.append((abs(hits_now / max(hits, 1) - 1), f"{hits_now:.0f} prompt tokens cached ({hits:.0f} before)"))
    if now.preemptions != was.preemptions:
        causes.append((1.0, f"{now.preemptions} preemptions ({was.preemptions} before)"))
    return ", ".join(text for _, text in sorted(causes, reverse=True)[:2])
