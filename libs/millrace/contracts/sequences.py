"""The id of one sequence: ``<request>.<index>``, the index counting the choices of the request from 0.

On the wire a sequence id is text. This module alone makes it and takes it apart.
"""

from __future__ import annotations

import msgspec


class SequenceId(msgspec.Struct, frozen=True, order=True):
    """One choice of one request. ``str()`` gives the wire form.

    Attributes:
        request: Request id; it may contain dots.
        index: Number of the choice, from 0.
    """

    request: str
    index: int

    def __str__(self) -> str:
        return f"{self.request}.{self.index}"

    @classmethod
    def parse(cls, text: str) -> SequenceId:
        """Read the wire form.

        Raises:
            ValueError: the text is not ``<request>.<index>`` with a decimal index.
        """
        request, _, index = text.rpartition(".")
        if not request or not index.isascii() or not index.isdigit():
            raise ValueError(f"not a sequence id: {text!r}")
        return cls(request, int(index))


def request_id_of(sequence: str) -> str:
    """Request id of a sequence id; text without a dot, which no ingress makes, is returned as it is."""
    return sequence.rpartition(".")[0] or sequence
