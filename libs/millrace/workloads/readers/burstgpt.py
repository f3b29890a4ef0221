"""BurstGPT traces: CSV with Timestamp (s), Request tokens and Response tokens. A failed request has no response."""

from __future__ import annotations

from pathlib import Path

from millrace.workloads.readers.columns import rows
from millrace.workloads.shape import Arrival, RequestShape, WorkloadError, tokens

_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def read(path: Path) -> list[Arrival]:
    """Rows with a response in order of time.

    Raises:
        WorkloadError: a column is missing, or a length or time is wrong.
    """
    arrivals: list[Arrival] = []
    for line, (at_s, *counts) in rows(path, _COLUMNS):
        prompt, output = (
            tokens(text, column=column, path=path, line=line, least=0)
            for column, text in zip(_COLUMNS[1:], counts, strict=True)
        )
        try:
            at_ns = int(float(at_s) * 1e9)
        except ValueError:
            raise WorkloadError(f"Timestamp is {at_s!r}, which is no number", path=path, line=line) from None
        if prompt and output:
            arrivals.append(Arrival(at_ns, RequestShape(prompt, output)))
    return sorted(arrivals, key=lambda arrival: arrival.at_ns)
