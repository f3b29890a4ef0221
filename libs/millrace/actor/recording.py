"""Bus recordings: the messages that ``millrace tap --record`` took from the bus.

A file is a sequence of length-prefixed MessagePack frames (4 bytes big endian, then the frame); the first is the
header. A file that ends inside a frame (the process was killed) reads as if it ended before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from millrace.actor.private_files import open_private

#: A frame larger than this is a damaged file, bytes.
FRAME_BYTES_MAX = 64 * 1024 * 1024


class TapHeader(msgspec.Struct, frozen=True, kw_only=True, tag="Header"):
    """First frame."""

    version: int = 1


class Tapped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One message as it was seen on the bus. ``headers`` is the raw block."""

    at_ns: int
    subject: str
    payload: bytes
    headers: bytes = b""
    reply_to: str = ""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[TapHeader | Tapped] = msgspec.msgpack.Decoder(TapHeader | Tapped)


class RecordingWriter:
    """Appends frames. The file is flushed with each frame, so a killed process leaves all but the last one."""

    def __init__(self, path: str | Path) -> None:
        self._file: BinaryIO = open_private(path, "wb")  # held until close()
        self.tapped(TapHeader())

    def tapped(self, frame: TapHeader | Tapped) -> None:
        """Appends one."""
        payload = _encoder.encode(frame)
        self._file.write(len(payload).to_bytes(4, "big") + payload)
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class RecordingReader:
    """Reads a recording from its start; iterate it for the frames after the header.

    Raises:
        ValueError: the file does not start with a header.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        first = next(self._frames(), None)
        if not isinstance(first, TapHeader):
            raise ValueError(f"{path} is no recording")

    def __iter__(self) -> Iterator[Tapped]:
        return (frame for frame in self._frames() if isinstance(frame, Tapped))

    def _frames(self) -> Iterator[TapHeader | Tapped]:
        with self._path.open("rb") as file:
            while len(prefix := file.read(4)) == 4:
                size = int.from_bytes(prefix, "big")
                payload = file.read(size) if size <= FRAME_BYTES_MAX else b""
                if len(payload) < size or not payload:
                    return
                try:
                    yield _decoder.decode(payload)
                except msgspec.DecodeError as error:
                    raise ValueError(f"{self._path} is no recording: {error}") from None
