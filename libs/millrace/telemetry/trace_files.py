"""Spans as JSON lines in a folder: the form without a collector. Bounded: files rotate, old ones are deleted."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from millrace.files import open_private

#: One file. Some 10,000 spans; `millrace trace` reads one in a few tens of milliseconds.
FILE_BYTES_MAX = 8 * 1024 * 1024

#: All files in the folder, of every service. A few hundred thousand spans: a day of trying things out.
FOLDER_BYTES_MAX = 256 * 1024 * 1024

#: A live file of another process is written to; one untouched for this long is a leftover.
LEFTOVER_S = 3600.0


class TraceFiles:
    """Appends lines to ``<service>-<instance>.jsonl``, which becomes ``<...>.<unix ns>.jsonl`` when it is full.

    Not thread-safe: it belongs to one Outbox thread.
    """

    def __init__(
        self,
        folder: Path,
        stem: str,
        *,
        file_bytes_max: int = FILE_BYTES_MAX,
        folder_bytes_max: int = FOLDER_BYTES_MAX,
    ) -> None:
        """Prepares the names; the file is opened by the first write."""
        self._folder = folder
        self._stem = re.sub(r"[^A-Za-z0-9_-]", "_", stem)
        self._file_bytes_max = file_bytes_max
        self._folder_bytes_max = folder_bytes_max
        self._file: BinaryIO | None = None

    @property
    def path(self) -> Path:
        return self._folder / f"{self._stem}.jsonl"

    def write(self, lines: Iterable[bytes]) -> None:
        """Appends lines (each without its newline) and hands them to the kernel.

        Raises:
            OSError: the folder cannot be written.
        """
        file = self._file or self._open()
        file.write(b"".join(line + b"\n" for line in lines))
        file.flush()
        if file.tell() >= self._file_bytes_max:
            self._rotate()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> BinaryIO:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = open_private(self.path, "ab")  # stays open between batches
        return self._file

    def _rotate(self) -> None:
        self.close()
        self.path.rename(self._folder / f"{self._stem}.{time.time_ns()}.jsonl")
        self._prune()

    def _prune(self) -> None:
        files = sorted(
            ((file.stat(), file) for file in self._folder.glob("*.jsonl")), key=lambda pair: pair[0].st_mtime
        )
        excess = sum(stat.st_size for stat, _ in files) - self._folder_bytes_max
        for stat, file in files:
            if excess <= 0:
                return
            if self._deletable(file, time.time() - stat.st_mtime):
                file.unlink(missing_ok=True)
                excess -= stat.st_size

    def _deletable(self, file: Path, age_s: float) -> bool:
        rotated = file.name.count(".") > 1
        return file != self.path and (rotated or age_s > LEFTOVER_S)
