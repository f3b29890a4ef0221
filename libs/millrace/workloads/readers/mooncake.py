"""Mooncake FAST'25 traces: JSON lines with timestamp (ms), input_length, output_length and hash_ids.

One id per 512 tokens of the prompt; requests with equal leading ids share a prefix. The conversation trace's times
stand in steps of about 3 s: requests of one step are spread evenly up to the next one.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from millrace.workloads.shape import Arrival, RequestShape, WorkloadError, tokens

#: Tokens that one hash id stands for.
BLOCK_TOKENS = 512
_FIELDS = ("timestamp", "input_length", "output_length")
_MS = 1_000_000
#: The last step has no next one: it lasts as long.
_STEP_NS = 3_000 * _MS


def read(path: Path) -> list[Arrival]:
    """All rows.

    Raises:
        WorkloadError: a line is no JSON object, lacks a field, a length is wrong, or times go back.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise WorkloadError(f"cannot be read: {error}", path=path) from None
    arrivals: list[Arrival] = []
    for line, text in enumerate(lines, 1):
        if not text.strip():
            continue
        arrival = _arrival(_object(text, path, line), path, line)
        if arrivals and arrival.at_ns < arrivals[-1].at_ns:
            raise WorkloadError("timestamp is before the one of the row above", path=path, line=line)
        arrivals.append(arrival)
    return spread(arrivals)


def spread(arrivals: list[Arrival]) -> list[Arrival]:
    """Requests with equal times, evenly apart up to the next time."""
    groups = [(at_ns, list(group)) for at_ns, group in groupby(arrivals, key=lambda arrival: arrival.at_ns)]
    evened: list[Arrival] = []
    for index, (at_ns, group) in enumerate(groups):
        until_ns = groups[index + 1][0] if index + 1 < len(groups) else at_ns + _STEP_NS
        evened += [Arrival(at_ns + (until_ns - at_ns) * i // len(group), a.shape) for i, a in enumerate(group)]
    return evened


def _object(text: bytes, path: Path, line: int) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise WorkloadError(f"is no JSON object: {error}", path=path, line=line) from None


def _arrival(row: dict[str, Any], path: Path, line: int) -> Arrival:
    missing = [field for field in _FIELDS if field not in row]
    if missing:
        raise WorkloadError(f"the field {', '.join(missing)} is missing", path=path, line=line)
    at_ms = row["timestamp"]
    if not isinstance(at_ms, int | float) or not 0 <= at_ms < 1e12:
        raise WorkloadError(f"timestamp is {at_ms!r}, which is no time in ms", path=path, line=line)
    prompt = tokens(row["input_length"], column="input_length", path=path, line=line)
    output = tokens(row["output_length"], column="output_length", path=path, line=line)
    ids = row.get("hash_ids", [])
    if not isinstance(ids, list) or not all(isinstance(name, int) for name in ids):
        raise WorkloadError("hash_ids must be a list of whole numbers", path=path, line=line)
    if ids and len(ids) != -(-prompt // BLOCK_TOKENS):
        raise WorkloadError(f"{len(ids)} hash_ids for {prompt} tokens of input", path=path, line=line)
    return Arrival(int(at_ms * _MS), RequestShape(prompt, output, tuple(ids), BLOCK_TOKENS if ids else 0))
