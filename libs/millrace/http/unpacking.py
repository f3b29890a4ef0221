"""Unpacks compressed request bodies, up to a bound: a few bytes of gzip may stand for gigabytes."""

from __future__ import annotations

import zlib

#: zlib's window argument for the gzip format.
_GZIP = 16 + zlib.MAX_WBITS


class UnpackingError(Exception):
    """The body is no gzip, or ends early."""


class TooLargeError(Exception):
    """The unpacked body passes the bound."""


def gunzip(packed: bytes, bytes_max: int) -> bytes:
    """The content of a gzip body of one or more members.

    Raises:
        UnpackingError, TooLargeError: as they say.
    """
    parts: list[bytes] = []
    left = bytes_max
    while packed:
        member = zlib.decompressobj(_GZIP)
        try:
            part = member.decompress(packed, left + 1)
        except zlib.error as error:
            raise UnpackingError(str(error)) from None
        left -= len(part)
        if left < 0:
            raise TooLargeError
        if not member.eof:
            raise UnpackingError("it ends early")
        parts.append(part)
        packed = member.unused_data
    return b"".join(parts)
