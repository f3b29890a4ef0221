"""Slow-down that engines of one host cause each other in a recorded run."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from millrace.contracts.status import StatusSnapshot

from bench.live.recording import Recording
from bench.live.step_fit import Window

#: Slow-downs that are tried.
TRIED = tuple(step / 50 for step in range(51))

#: Fewest windows alone, and beside a neighbour, that tell them apart.
WINDOWS_MIN = 100


class _Busy:
    """Times at which an engine computed, as its snapshots tell."""

    def __init__(self, snapshots: Sequence[StatusSnapshot]) -> None:
        told = sorted(snapshots, key=lambda each: each.at_ns)
        self._at = np.array([each.at_ns for each in told], dtype=np.int64)
        self._busy = np.array([bool(each.running or each.waiting) for each in told], dtype=np.float64)
        self._sum = np.concatenate([[0.0], np.cumsum(self._busy[:-1] * np.diff(self._at))]) if told else np.zeros(0)

    def until(self, times_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Busy time from the first snapshot until each time, ns."""
        if not self._at.size:
            return np.zeros(len(times_ns))
        index = np.maximum(np.searchsorted(self._at, times_ns, side="right") - 1, 0)
        since = np.maximum(times_ns - self._at[index], 0)
        return np.asarray(self._sum[index] + self._busy[index] * since)


def with_neighbours(recording: Recording, name: str, rows: Sequence[Window]) -> list[Window]:
    """Windows of an engine, each with how many others of its host computed meanwhile, on average over its time."""
    hosts = {record.instance: record.host for record in recording.instances}
    others = [other for other, host in hosts.items() if other != name and host and host == hosts[name]]
    ends = np.array([row.at_ns for row in rows], dtype=np.int64)
    walls = np.array([row.wall_ns for row in rows], dtype=np.int64)
    share = np.zeros(len(rows))
    for other in others:
        busy = _Busy([each for each in recording.snapshots if each.instance == other])
        share += (busy.until(ends) - busy.until(ends - walls)) / np.maximum(walls, 1)
    return [msgspec.structs.replace(row, neighbours=float(n)) for row, n in zip(rows, share, strict=True)]


def slowdown(rows: Sequence[Window], features: npt.NDArray[np.float64]) -> float:
    """The share by which each busy neighbour makes steps longer: what leaves the least error.

    Args:
        features: Of the windows, in the order of ``rows``.
    """
    share = np.array([row.neighbours for row in rows])
    if min((share < 0.5).sum(), (share >= 0.5).sum()) < WINDOWS_MIN:
        return 0.0
    walls = np.array([row.wall_ns for row in rows], dtype=np.float64)
    weights = 1 / np.sqrt(walls)
    errors = []
    for tried in TRIED:
        weighted = features * ((1 + tried * share) * weights)[:, None]
        solution = np.linalg.lstsq(weighted, walls * weights, rcond=None)[0]
        errors.append(float(((weighted @ solution - walls * weights) ** 2).sum()))
    return TRIED[int(np.argmin(errors))]


def alone(rows: Sequence[Window], slowed: float) -> list[Window]:
    """The windows as they would have been without neighbours."""
    return [msgspec.structs.replace(row, wall_ns=round(row.wall_ns / (1 + slowed * row.neighbours))) for row in rows]
