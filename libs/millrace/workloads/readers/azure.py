"""Azure LLM inference traces 2023: CSV with TIMESTAMP, ContextTokens, GeneratedTokens, in order of time."""

from __future__ import annotations

import datetime
from pathlib import Path

from millrace.workloads.readers.columns import rows
from millrace.workloads.shape import Arrival, RequestShape, WorkloadError, tokens

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read(path: Path) -> list[Arrival]:
    """All rows; the first comes at 0.

    Raises:
        WorkloadError: a column is missing, a length or time is wrong, or times go back.
    """
    arrivals: list[Arrival] = []
    began_ns = before_ns = 0
    for line, (stamp, prompt, output) in rows(path, _COLUMNS):
        at_ns = _unix_ns(stamp, path, line)
        if not arrivals:
            began_ns = before_ns = at_ns
        if at_ns < before_ns:
            raise WorkloadError(f"TIMESTAMP {stamp} is before the one of the row above", path=path, line=line)
        before_ns = at_ns
        shape = RequestShape(
            tokens(prompt, column="ContextTokens", path=path, line=line),
            tokens(output, column="GeneratedTokens", path=path, line=line),
        )
        arrivals.append(Arrival(at_ns - began_ns, shape))
    return arrivals


def _unix_ns(stamp: str, path: Path, line: int) -> int:
    """The traces have seven digits of a second, one more than datetime takes."""
    whole, _dot, digits = stamp.partition(".")
    try:
        seconds = datetime.datetime.fromisoformat(whole).replace(tzinfo=datetime.UTC).timestamp()
        return int(seconds) * 1_000_000_000 + int(digits.ljust(9, "0")[:9] or 0)
    except ValueError:
        raise WorkloadError(f"TIMESTAMP is {stamp!r}, which is no time", path=path, line=line) from None
