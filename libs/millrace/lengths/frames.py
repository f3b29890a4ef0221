"""Bounded files of recorded values: a header line, then MessagePack with its length before it.

A full file becomes the older half (``.1``), and a new one begins. One that ends inside a frame, since its writer was
killed, ends before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

#: A longer frame is a damaged file, bytes.
FRAME_BYTES_MAX = 1 << 24
#: A longer first line is none of a header, bytes.
HEADER_BYTES_MAX = 4_096

_encoder = msgspec.msgpack.Encoder()


class FileUnreadable(ValueError):
    """A recording that this version cannot learn from; the text names file and reason."""


class FrameWriter:
    """Appends to a file. Each call writes at once."""

    def __init__(self, path: Path, header: bytes, *, values_max: int, written: int | None = None) -> None:
        """Writes nothing yet. ``written``: values that the file has; None to begin a new one."""
        self._path, self._header = path, header
        self._values_max, self._written = values_max, written

    def append(self, values: Sequence[Any]) -> None:
        """Writes at the end.

        Raises:
            OSError: it cannot be written.
        """
        if self._written is None or self._written >= self._values_max:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                self._path.replace(older(self._path))
            self._path.write_bytes(self._header)
            self._written = 0
        frames = [_encoder.encode(value) for value in values]
        with self._path.open("ab") as file:
            file.write(b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames))
        self._written += len(frames)


def older(path: Path) -> Path:
    """Name of a file's older half."""
    return path.with_name(path.name + ".1")


def read_header(file: BinaryIO) -> bytes:
    """The first line."""
    return file.readline(HEADER_BYTES_MAX)


def read_frames(file: BinaryIO, decoder: msgspec.msgpack.Decoder[Any]) -> Iterator[Any]:
    """Values behind the header.

    Raises:
        FileUnreadable: it is damaged. OSError: it cannot be read.
    """
    while len(prefix := file.read(4)) == 4:
        size = int.from_bytes(prefix, "big")
        if size > FRAME_BYTES_MAX:
            raise FileUnreadable(f"{file.name}: damaged, a frame of {size} bytes")
        frame = file.read(size)
        if len(frame) < size:
            return
        try:
            yield decoder.decode(frame)
        except msgspec.DecodeError as error:
            raise FileUnreadable(f"{file.name}: {error}") from None
