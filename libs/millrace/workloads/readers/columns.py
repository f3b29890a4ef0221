"""CSV with named columns, read row by row with the line at hand."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from millrace.workloads.shape import WorkloadError


def rows(path: Path, wanted: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    """Pairs of (line, the wanted columns).

    Raises:
        WorkloadError: the file cannot be read, lacks a column, or a row is short.
    """
    try:
        with path.open(newline="") as file:
            yield from _read(csv.reader(file), path, wanted)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise WorkloadError(f"cannot be read: {error}", path=path) from None


def _read(reader: Iterator[list[str]], path: Path, wanted: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    header = next(reader, None)
    missing = [column for column in wanted if header is None or column not in header]
    if header is None or missing:
        raise WorkloadError(f"the column {', '.join(missing)} is missing", path=path, line=1)
    places = [header.index(column) for column in wanted]
    for row in reader:
        line = reader.line_num  # type: ignore[attr-defined]
        if not row:
            continue
        if len(row) <= max(places):
            raise WorkloadError(f"{len(row)} columns instead of {len(header)}", path=path, line=line)
        yield line, [row[place] for place in places]
