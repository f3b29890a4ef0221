"""Files that only their owner reads, since they may hold what users wrote, and files that are replaced as one step."""

from __future__ import annotations

import os
from collections.abc import Callable
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


def file_text(path: str | Path, read: Callable[[Path], str] = Path.read_text) -> str:
    """Content of a file, or what ``read`` tells of it, without blanks around it; empty where it is not there."""
    try:
        return read(Path(path)).strip()
    except OSError:
        return ""


def replace_file(path: Path, content: bytes, *, private: bool = False) -> None:
    """Replaces a file as one step: readers see the old content or the new. Its folder is made where missing.

    Args:
        private: for the owner alone.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with open_private(fresh, "wb") if private else fresh.open("wb") as file:
        file.write(content)
    fresh.replace(path)


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags, PRIVATE)
