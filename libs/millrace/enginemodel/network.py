"""Transfer time of modelled KV between two engines: the port, and a wire of constant speed.

The simulator's network (sim/kv_network.py) shares bandwidth among transfers and fails; this one stands behind live
modelled engines, which have no way to look into each other.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

import msgspec

from millrace.contracts.kv import CopierKind, KvEndpoint, KvRank, KvRefusal
from millrace.enginemodel.contents import KvContent
from millrace.enginemodel.parameters import EngineParameters

#: Key of KvRank.handles under which a modelled engine says who it is.
HANDLE = CopierKind.MODELLED.value
#: Of one token over all layers: 8 KV heads of 128, 32 layers, two bytes, K and V.
TOKEN_BYTES = 131_072


class KvRead(msgspec.Struct, frozen=True, kw_only=True):
    """One read out of another engine's cache.

    Attributes:
        endpoint: Of the source.
        blocks: Source block ids.
        into: Block ids of the target, as many.
        checksums: That the blocks must have; empty for unchecked.
        lease: Under which the source holds them; empty where it is named as the migration.
    """

    migration: str
    endpoint: KvEndpoint
    blocks: list[int]
    into: list[int]
    checksums: list[list[int]] = []
    lease: str = ""

    @property
    def bytes(self) -> int:
        """Of all blocks."""
        return len(self.blocks) * self.endpoint.block_bytes

    @property
    def descriptors(self) -> int:
        """Pieces that are contiguous on both sides."""
        pairs = list(zip(self.blocks, self.into, strict=True))
        breaks = (a + 1 != c or b + 1 != d for (a, b), (c, d) in pairwise(pairs))
        return sum(breaks) + (1 if pairs else 0)


class KvReadEnded(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a read.

    Attributes:
        refusal: None where it succeeded, checksums included.
        contents: What was in each of ``blocks``; empty where the network cannot look into the source.
    """

    refusal: KvRefusal | None = None
    detail: str = ""
    contents: list[KvContent] = []


class KvNetwork(Protocol):
    """Carries modelled KV into one engine."""

    def begin(self, read: KvRead, done: Callable[[KvReadEnded], None]) -> Callable[[], None]:
        """Starts a read. ``done`` is called once, never within this call, unless the returned function, which cancels
        the read, was called before.
        """
        ...


class Clock(Protocol):
    """Time as a driver knows it."""

    def now_ns(self) -> int:
        """Unix ns, never going back."""
        ...

    def at(self, time_ns: int, callback: Callable[[], None]) -> None:
        """Calls back at that time, or with the next turn where it has passed; never within this call."""


class ConstantNetwork:
    """Every read has the whole wire for itself, and succeeds."""

    def __init__(self, clock: Clock, *, bytes_per_s: float, latency_ns: int) -> None:
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._latency_ns = latency_ns

    def begin(self, read: KvRead, done: Callable[[KvReadEnded], None]) -> Callable[[], None]:
        wanted = [True]
        ends_ns = self._clock.now_ns() + self._latency_ns + round(read.bytes / self._bytes_per_s * 1e9)

        def end() -> None:
            if wanted:
                done(KvReadEnded())

        self._clock.at(ends_ns, end)
        return wanted.clear


def modelled_endpoint(
    parameters: EngineParameters, *, key: str, model: str, machine: str = "", token_bytes: int = TOKEN_BYTES
) -> KvEndpoint:
    """Return the KV endpoint of a modelled engine.

    Args:
        key: Tells this engine, in this incarnation, from all others.
        machine: The host, where the network knows hosts.
    """
    return KvEndpoint(
        fingerprint=f"modelled/{model}/{parameters.block_size}/{token_bytes}",
        block_tokens=parameters.block_size,
        block_bytes=parameters.block_size * token_bytes,
        blocks=parameters.blocks_total + 1,
        copiers=[CopierKind.MODELLED],
        ranks=[KvRank(planes=[], region_bytes=0, handles={HANDLE: key.encode()})],
        machine=machine,
        groups=list(parameters.groups),
    )


def endpoint_key(endpoint: KvEndpoint) -> str:
    """The ``key`` of an endpoint that ``modelled_endpoint`` made; empty for any other one."""
    return endpoint.ranks[0].handles.get(HANDLE, b"").decode() if endpoint.ranks else ""
