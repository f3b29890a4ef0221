"""Lengths without times: CSV with num_prefill_tokens and num_decode_tokens, as Block and Vidur keep ShareGPT."""

from __future__ import annotations

from pathlib import Path

from millrace.workloads.readers.columns import rows
from millrace.workloads.shape import Arrival, RequestShape, tokens

_COLUMNS = ("num_prefill_tokens", "num_decode_tokens")


def read(path: Path) -> list[Arrival]:
    """All rows in file order, at time 0.

    Raises:
        WorkloadError: a column is missing or a length is wrong.
    """
    return [
        Arrival(
            0,
            RequestShape(
                tokens(prompt, column=_COLUMNS[0], path=path, line=line),
                tokens(output, column=_COLUMNS[1], path=path, line=line),
            ),
        )
        for line, (prompt, output) in rows(path, _COLUMNS)
    ]
