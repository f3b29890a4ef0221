"""Orders that are done: a repeated one is answered as before and moves nothing again."""

from __future__ import annotations

from millrace.contracts.migration import MigrationFinished
from msgspec.structs import replace

#: Orders remembered. A broker repeats one within seconds, and an instance ends a few migrations in each.
ORDERS_MAX = 1_024


class FinishedOrders:
    """Results of the last orders, by sequence and order."""

    def __init__(self, *, orders_max: int = ORDERS_MAX) -> None:
        self._orders_max = orders_max
        self._ended: dict[tuple[str, str], MigrationFinished] = {}

    def keep(self, body: MigrationFinished) -> None:
        """Remember an end for each of its orders; without the block hashes, which only its publication needs."""
        small = replace(body, block_size=0, block_hashes=b"")
        for order in body.orders:
            self._ended[(body.sequence, order)] = small
            if len(self._ended) > self._orders_max:
                del self._ended[next(iter(self._ended))]

    def find(self, sequence: str, order: str) -> MigrationFinished | None:
        """The end of an order; None where it is unknown or was forgotten."""
        return self._ended.get((sequence, order)) if order else None
