"""ServeGen: clients by their rate, burstiness and length distributions; requests are drawn from them.

A folder holds ``chunk-N-trace.csv`` (window start in s, rate, CV, family, two parameters) and ``chunk-N-dataset.json``
(per window of six hours the probabilities of input and output lengths). Prompt and output are drawn independently:
their joint distribution was not released.
"""

from __future__ import annotations

import ast
import csv
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from millrace.workloads.shape import TOKENS_MAX, Arrival, RequestShape, WorkloadError

#: Length of a window of rates, s.
WINDOW_S = 600
_KINDS = ("input_tokens", "output_tokens")


class Distribution:
    """Lengths with their probabilities."""

    def __init__(self, table: dict[Any, Any], *, path: Path) -> None:
        try:
            pairs = sorted((int(length), float(share)) for length, share in table.items())
        except (TypeError, ValueError):
            raise WorkloadError("lengths and probabilities must be numbers", path=path) from None
        if not pairs or pairs[-1][0] > TOKENS_MAX or any(share < 0 for _length, share in pairs):
            raise WorkloadError("a length or probability is negative, absurd, or there is none", path=path)
        self._lengths = [max(1, length) for length, _share in pairs]
        self._sums = list(accumulate(share for _length, share in pairs))

    def draw(self, rng: Random) -> int:
        index = bisect_right(self._sums, rng.random() * self._sums[-1])
        return self._lengths[min(index, len(self._lengths) - 1)]


class Client:
    """One client: its windows of (start s, rate, CV) and its lengths by window of six hours."""

    def __init__(self, trace: Path) -> None:
        self.windows = _windows(trace)
        self._lengths = _lengths(trace.with_name(trace.name.replace("-trace.csv", "-dataset.json")))

    def arrivals(self, rng: Random, begin_s: float, end_s: float, speed: float) -> list[Arrival]:
        """Its requests between two times of the day, at ``speed`` times its rate."""
        arrivals: list[Arrival] = []
        for start_s, rate, cv in self.windows:
            low_s, high_s = max(begin_s, start_s), min(end_s, start_s + WINDOW_S)
            if rate <= 0 or low_s >= high_s:
                continue
            shape = 1 / max(cv, 0.05) ** 2
            at_s = low_s + rng.gammavariate(shape, 1 / (rate * speed * shape)) * rng.random()
            while at_s < high_s:
                arrivals.append(Arrival(int((at_s - begin_s) * 1e9), self._shape(rng, at_s)))
                at_s += rng.gammavariate(shape, 1 / (rate * speed * shape))
        return arrivals

    def _shape(self, rng: Random, at_s: float) -> RequestShape:
        starts = [start for start, _inputs, _outputs in self._lengths]
        _start, inputs, outputs = self._lengths[max(0, bisect_right(starts, at_s) - 1)]
        return RequestShape(inputs.draw(rng), outputs.draw(rng))


def read(folder: Path, rng: Random, *, begin_s: float, count: int, speed: float = 1.0) -> list[Arrival]:
    """The first ``count`` requests of all clients together from a time of the day on.

    Raises:
        WorkloadError: the folder holds no clients, a file is wrong, or the clients are idle from there on.
    """
    traces = sorted(folder.glob("chunk-*-trace.csv"))
    if not traces:
        raise WorkloadError("holds no chunk-N-trace.csv", path=folder)
    clients = [Client(trace) for trace in traces]
    last_s = max(start_s for client in clients for start_s, _rate, _cv in client.windows) + WINDOW_S
    arrivals: list[Arrival] = []
    low_s = begin_s
    while len(arrivals) < count and low_s < last_s:
        high_s = low_s + WINDOW_S
        offset_ns = int((low_s - begin_s) * 1e9)
        fresh = [arrival for client in clients for arrival in client.arrivals(rng, low_s, high_s, speed)]
        arrivals += [Arrival(a.at_ns + offset_ns, a.shape) for a in sorted(fresh, key=lambda a: a.at_ns)]
        low_s = high_s
    if not arrivals:
        raise WorkloadError(f"no client sends anything from {begin_s:g} s on", path=folder)
    return arrivals[:count]


def _windows(path: Path) -> list[tuple[float, float, float]]:
    windows: list[tuple[float, float, float]] = []
    try:
        with path.open(newline="") as file:
            for line, row in enumerate(csv.reader(file), 1):
                windows.append(_window(row, path, line))
                if len(windows) > 1 and windows[-1][0] <= windows[-2][0]:
                    raise WorkloadError("the window does not begin after the one above", path=path, line=line)
    except OSError as error:
        raise WorkloadError(f"cannot be read: {error}", path=path) from None
    return windows


def _window(row: list[str], path: Path, line: int) -> tuple[float, float, float]:
    if len(row) < 3:
        raise WorkloadError(f"{len(row)} columns; start, rate and CV are needed", path=path, line=line)
    try:
        start_s, rate, cv = (float(value or 0) for value in row[:3])
    except ValueError:
        raise WorkloadError(f"{','.join(row[:3])} are no numbers", path=path, line=line) from None
    if rate < 0 or cv < 0 or rate > 1e6:
        raise WorkloadError(f"rate {rate:g} and CV {cv:g} must not be negative or absurd", path=path, line=line)
    return start_s, rate, cv


def _lengths(path: Path) -> list[tuple[float, Distribution, Distribution]]:
    try:
        document = msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, str]])
    except (OSError, msgspec.DecodeError) as error:
        raise WorkloadError(f"cannot be read: {error}", path=path) from None
    windows: list[tuple[float, Distribution, Distribution]] = []
    for start, tables in document.items():
        missing = [kind for kind in _KINDS if kind not in tables]
        if missing:
            raise WorkloadError(f"window {start} lacks {', '.join(missing)}", path=path)
        parts = [_table(tables[kind], path) for kind in _KINDS]
        if all(parts):
            windows.append((float(start), Distribution(parts[0], path=path), Distribution(parts[1], path=path)))
    if not windows:
        raise WorkloadError("no window has lengths", path=path)
    return sorted(windows, key=lambda entry: entry[0])


def _table(text: str, path: Path) -> dict[Any, Any]:
    """The tables are written as Python dictionaries; only literals are read."""
    try:
        table = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise WorkloadError("a table of lengths is no dictionary", path=path) from None
    if not isinstance(table, dict):
        raise WorkloadError("a table of lengths is no dictionary", path=path)
    return table
