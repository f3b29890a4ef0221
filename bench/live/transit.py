"""Transit times of messages in recorded runs, each part measured by itself, in the halves that are fitted.

Beside waiting and computing, a request's way to its first token has these parts: two messages to the predictors and
back, where they are asked; one to the worker; from the worker into the engine's next batch; one back with the token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec
import numpy as np
from millrace.contracts.status import StatusSnapshot

from bench.live.halves import fitted_on
from bench.live.recording import Recording

#: Of a message: to the bus and from it.
HOPS = 2

#: One hop where no placement tells.
HOP_US = 100.0

#: Who came so long before a batch was put together is in it, ns; else the batch was full, which is no way.
INTO_NS = 10_000_000

#: Ages that are taken for equal, us.
AGE_US = 500

#: Fewest sequences that tell how long the way into a batch is.
INTO_MIN = 30


class Transit(msgspec.Struct, frozen=True, kw_only=True):
    """Transit times of messages, us: the least (5th percentile), and on average.

    Attributes:
        hop_least, hop_mean: One hop, half of a message between services that run on any core.
        worker_least, worker_mean: What the hop to or from a worker takes on top, the mean of both directions: it shares
            its core with an engine, which is a process of its own.
        there, into, back: Of which to the worker, from it into a batch, from the batch to ingress, on average.
    """

    hop_least: float
    hop_mean: float
    worker_least: float
    worker_mean: float
    there: float = 0.0
    into: float = 0.0
    back: float = 0.0


def transit(recordings: Sequence[Recording]) -> Transit:
    """Ways in the halves that are fitted."""
    hop_least, hop_mean = (v / (2 * HOPS) for v in _least_and_mean(_asked_us(recordings), 2 * HOPS * HOP_US))
    least, mean = HOPS * hop_least, HOPS * hop_mean
    there = _least_and_mean([us for each in recordings for us in _there_us(each)], mean)
    back = _least_and_mean([us for each in recordings for us in _back_us(each)], mean)
    into = _into([age for each in recordings for age in _ages(each)])
    return Transit(
        hop_least=hop_least,
        hop_mean=hop_mean,
        worker_least=max(0.0, there[0] + back[0] + into[0] - 2 * least) / 2,
        worker_mean=max(0.0, there[1] + back[1] + into[1] - 2 * mean) / 2,
        there=there[1],
        into=into[1],
        back=back[1],
    )


def _asked_us(recordings: Sequence[Recording]) -> list[float]:
    """A placement to which predictors were asked comes two messages after the arrival."""
    found = []
    for recording in recordings:
        asked = {d.request for d in recording.decisions if d.forecasts and not d.fallback}
        placed = [o for o in recording.outcomes if o.placed_ns and fitted_on(recording, o.arrival_ns)]
        found += [(o.placed_ns - o.arrival_ns) / 1e3 for o in placed if o.request in asked]
    return found


def _there_us(recording: Recording) -> Iterator[float]:
    """From a placement to the worker."""
    reached = _reached(recording)
    for o in recording.outcomes:
        at_ns = reached.get(o.request, 0)
        if o.placed_ns and at_ns > 0 and fitted_on(recording, o.arrival_ns):
            yield (at_ns - o.placed_ns) / 1e3


def _back_us(recording: Recording) -> Iterator[float]:
    """From the end of the step that gave a first token to ingress; where a snapshot was taken of that very step."""
    outcomes = {o.request: o for o in recording.outcomes if o.ttft_ns is not None}
    for snapshot in recording.snapshots:
        for entry in snapshot.running:
            o = outcomes.get(entry.sequence.rpartition(".")[0])
            if o is not None and entry.output_tokens == 1 and fitted_on(recording, o.arrival_ns):
                yield (o.arrival_ns + (o.ttft_ns or 0) - snapshot.at_ns) / 1e3


def _ages(recording: Recording) -> Iterator[tuple[float, bool]]:
    """Yield the age of a sequence at its worker when a batch was put together, us, and whether the batch had it.

    Between two snapshots of successive steps one batch is put together, just after the first; a sequence that came
    before and is in neither snapshot was still on its way.
    """
    reached = sorted((at_ns, name) for name, at_ns in _reached(recording).items() if at_ns > 0)
    names = {record.instance for record in recording.instances}
    served = {o.request: o.instances[-1] for o in recording.outcomes if o.instances}
    for name in sorted(names):
        came = [(at_ns, request) for at_ns, request in reached if served.get(request) == name]
        snapshots = sorted((s for s in recording.snapshots if s.instance == name), key=lambda each: each.step)
        for before, after in pairwise(snapshots):
            if after.step == before.step + 1 and before.running and fitted_on(recording, before.at_ns):
                yield from _between(before, after, came)


def _between(
    before: StatusSnapshot, after: StatusSnapshot, came: Sequence[tuple[int, str]]
) -> Iterator[tuple[float, bool]]:
    had, has = _held(before), _held(after)
    first, end = (bisect_left(came, (at_ns, "")) for at_ns in (before.at_ns - INTO_NS, before.at_ns))
    for at_ns, request in came[first:end]:
        if request not in had:
            yield (before.at_ns - at_ns) / 1e3, request in has


def _into(ages: Sequence[tuple[float, bool]]) -> tuple[float, float]:
    """Least and mean of the way into a batch: the share of those on their way still, at each age, added up."""
    if len(ages) < INTO_MIN:
        return 0.0, 0.0
    mean, share = 0.0, 1.0
    for first in range(0, INTO_NS // 1000, AGE_US):
        among = [taken for age, taken in ages if first <= age < first + AGE_US]
        share = 1 - sum(among) / len(among) if among else share
        mean += AGE_US * share
    return min([mean, *(age for age, taken in ages if taken)]), mean


def _held(snapshot: StatusSnapshot) -> set[str]:
    return {entry.sequence.rpartition(".")[0] for entry in (*snapshot.running, *snapshot.waiting)}


def _reached(recording: Recording) -> dict[str, int]:
    """Return the time at which each request came to its worker, unix ns."""
    found: dict[str, int] = {}
    for snapshot in recording.snapshots:
        for entry in (*snapshot.running, *snapshot.waiting):
            found.setdefault(entry.sequence.rpartition(".")[0], entry.arrival_ns)
    return found


def _least_and_mean(times_us: Sequence[float], otherwise_us: float) -> tuple[float, float]:
    if not times_us:
        return otherwise_us, otherwise_us
    return max(0.0, float(np.percentile(times_us, 5))), max(0.0, float(np.mean(times_us)))
