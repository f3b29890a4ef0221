"""Measuring while nobody else does: an exclusive lock on a file, where one is named."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def quiet(path: Path | None) -> Iterator[None]:
    """Holds the lock; without a path, holds nothing."""
    if path is None:
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
