"""Behaviour of links between nodes and the bus: delay, loss, duplication and reordering (link.py draws them).

A healthy link is a TCP connection: it keeps order. Faults model what a sequence of broken connections, overrun buffers
and retries can look like to the layers above. They are also worse than that, since no layer above may rely on more
than at-most-once delivery.
"""

from __future__ import annotations

import msgspec


class LinkModel(msgspec.Struct, frozen=True, kw_only=True):
    """Behaviour of a link, in each direction.

    Attributes:
        delay_ns: Least delay.
        jitter_ns: Mean of an exponential delay on top; 0 for a constant delay.
        loss: Share of messages that never arrive, 0 to 1.
        duplicate: Share that arrives twice.
        reorder: Share that is held back and lets later ones pass.
        hold_ns: Longest time that a reordered or duplicated one is held back.
    """

    delay_ns: int = 100_000
    jitter_ns: int = 0
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    hold_ns: int = 20_000_000

    @property
    def is_faulty(self) -> bool:
        return self.loss > 0 or self.duplicate > 0 or self.reorder > 0
