"""Opens files that may hold what users wrote: logs, traces, recordings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, Literal, cast

#: Readable and writable by the owner alone.
PRIVATE = 0o600


def open_private(path: str | Path, mode: Literal["ab", "wb"]) -> BinaryIO:
    """Opens a file for the owner alone, also one that was there before with other permissions.

    Raises:
        OSError: as open() does.
    """
    file = cast(BinaryIO, open(path, mode, opener=_opener))  # noqa: SIM115  # the caller closes it
    if os.fstat(file.fileno()).st_mode & 0o077:
        os.fchmod(file.fileno(), PRIVATE)
    return file


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags, PRIVATE)
