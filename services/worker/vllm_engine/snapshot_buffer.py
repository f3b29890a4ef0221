"""A sequence lock in shared memory: the engine process writes its last snapshot, the worker process reads it.

One writer, any number of readers, no waiting on either side. Layout of the file:

    0   u64  sequence: odd while a write is under way
    8   u64  CRC-32 of the payload << 32 | length of the payload, bytes
    16  payload
    end - 16  u64  monotonic ns of the engine process's last sign of life; 0 before the first
    end - 8   u64  monotonic ns at which the step under way began; 0 between steps

A reader that meets a write under way, or a torn one (the checksum tells, also where the processor reorders stores),
gets nothing and asks again with the next step. Both words are written whole: ``struct.pack_into`` would zero its
place first and then write byte by byte, and a header of zeros is the right one of an empty payload.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import zlib
from pathlib import Path

#: Room for some 10,000 sequences at 100 bytes each.
SIZE = 1 << 20
_PREFIX = "millrace-snapshot-"
_HEADER_BYTES = 16
_TRAILER_BYTES = 16
_BEAT, _STEP = -2, -1
#: Memory where there is such a file system, a plain file otherwise.
_FOLDERS = ("/dev/shm", tempfile.gettempdir())


def create() -> Path:
    """Makes an empty buffer file for one engine. Delete it once the engine has opened it."""
    folder = next(folder for folder in _FOLDERS if os.access(folder, os.W_OK))
    _sweep(Path(folder))
    descriptor, path = tempfile.mkstemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=folder)
    os.truncate(descriptor, SIZE)
    os.close(descriptor)
    return Path(path)


def _sweep(folder: Path) -> None:
    """Deletes what workers left behind that were killed while their engine started."""
    for left in folder.glob(f"{_PREFIX}*"):
        owner = left.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdigit() and Path("/proc/self").exists() and not Path("/proc", owner).exists():
            try:
                left.unlink()
            except OSError:
                pass  # another worker was quicker, or it is another user's


class SnapshotWriter:
    """The engine's side."""

    def __init__(self, path: Path | str) -> None:
        with Path(path).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), SIZE)
        self._words = memoryview(self._map).cast("Q")
        self._sequence = 0

    def write(self, payload: bytes) -> bool:
        """Replaces the snapshot; False where it does not fit, and the old one stays."""
        length = len(payload)
        if length > SIZE - _HEADER_BYTES - _TRAILER_BYTES:
            return False
        self._words[0] = self._sequence + 1
        self._map[_HEADER_BYTES : _HEADER_BYTES + length] = payload
        self._words[1] = zlib.crc32(payload) << 32 | length
        self._sequence += 2
        self._words[0] = self._sequence
        return True

    def beat(self, monotonic_ns: int) -> None:
        """Writes a sign of life."""
        self._words[_BEAT] = monotonic_ns

    def step(self, since_ns: int) -> None:
        """Writes when a step began (monotonic ns), or 0 when it ended."""
        self._words[_STEP] = since_ns


class SnapshotReader:
    """The worker's side. Keeps its mapping after the file is deleted."""

    def __init__(self, path: Path | str) -> None:
        with Path(path).open("rb") as file:
            self._map = mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_READ)
        self._words = memoryview(self._map).cast("Q")
        self._seen = 0

    def read_new(self) -> bytes | None:
        """The snapshot, if there is a whole one that was not read before."""
        sequence = self._words[0]
        if sequence % 2 or sequence <= self._seen:
            return None
        checksum, length = divmod(self._words[1], 1 << 32)
        if length > SIZE - _HEADER_BYTES - _TRAILER_BYTES:
            return None
        payload = self._map[_HEADER_BYTES : _HEADER_BYTES + length]
        if zlib.crc32(payload) != checksum or self._words[0] != sequence:
            return None
        self._seen = sequence
        return payload

    def signs(self) -> tuple[int, int]:
        """Monotonic ns of the last sign of life and of the begin of the step under way; 0 for none."""
        return self._words[_BEAT], self._words[_STEP]

    def close(self) -> None:
        """Ends the mapping. Idempotent."""
        self._words.release()
        self._map.close()
