"""The KV cache of one rank as other engines see it: what its blocks are, and the copiers that work on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from millrace.contracts.kv import CopierKind, KvPlane, KvRank
from millrace.kvcopy.checksum import BlockChecksums
from millrace.kvcopy.copier_port import Copier, CopierError, Link, Transfer
from millrace.kvcopy.plan import Planner

from services.worker.vllm_engine.kv_memory import KvMemory
from services.worker.vllm_engine.layout import merged

#: Peers kept connected; one more closes the one used least recently. A machine has some tens of engines.
PEERS_MAX = 32
#: Layouts by name whose blocks are contiguous within a layer: L(ayer) and B(lock) come first, in either order.
_BLOCKWISE = ("LB", "BL")


class Unplaceable(Exception):
    """The cache cannot be read from outside; the message says why."""


#: What a peer that is gone, or that says nonsense, may cause: block ids beyond any region, malformed handles.
_EXPECTED = (CopierError, Unplaceable, ValueError, OverflowError, OSError, msgspec.MsgspecError)


def planes(kv_cache_config: Any, layout: str) -> list[KvPlane]:
    """One plane per layer, K and V of a block together, in the order of layers; one for all where blocks come first.

    Raises Unplaceable: blocks of a layer are not contiguous.
    """
    if not layout.startswith(_BLOCKWISE):
        raise Unplaceable(f"in layout {layout} a block is not one piece of a layer")
    found = []
    for tensor in kv_cache_config.kv_cache_tensors:
        page = _page_bytes(kv_cache_config, tensor.layers[0])
        for index in range(len(tensor.layers)):
            offset = tensor.offset + index * tensor.layer_stride
            found.append(KvPlane(offset=offset, stride=tensor.block_stride, bytes=page))
    return merged(found)


def _page_bytes(kv_cache_config: Any, layer: str) -> int:
    group = next(group for group in kv_cache_config.kv_cache_groups if layer in group.layer_names)
    return int(group.kv_cache_spec.page_size_bytes)


class _Peer(msgspec.Struct):
    link: Link
    planner: Planner


class KvRegion:
    """One rank's KV: offers it, checks it, and reads other engines' into it."""

    def __init__(self, memory: KvMemory, kv_planes: list[KvPlane], copiers: dict[CopierKind, Copier]) -> None:
        """Owns the copiers from now on."""
        self.rank = KvRank(planes=kv_planes, region_bytes=memory.size, device=memory.device)
        self._memory = memory
        self._copiers = copiers
        self._checksums = BlockChecksums(memory.shared.view, self.rank) if memory.shared is not None else None
        self._peers: dict[tuple[CopierKind, bytes], _Peer] = {}
        self._transfers: dict[str, Transfer] = {}

    def offer(self) -> KvRank:
        """The rank with what peers need for each copier; one that fails is given up.

        Raises CopierError: none is left.
        """
        failures: list[str] = []
        for kind, copier in list(self._copiers.items()):
            try:
                self.rank = copier.offer(self.rank)
            except CopierError as error:
                failures.append(f"{kind}: {error}")
                self._copiers.pop(kind).close()
        if not self._copiers:
            raise CopierError("; ".join(failures))
        return self.rank

    @property
    def kinds(self) -> list[CopierKind]:
        """Copiers offered, best first."""
        return list(self._copiers)

    def connect(self, kind: CopierKind, peer: KvRank) -> None:
        """Opens a peer, for reads to come. Raises CopierError: it cannot be reached this way."""
        self._peer(kind, peer)

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        """CRC-32C of each block."""
        if self._checksums is None:
            return self._memory.checksums(self.rank.planes, blocks)
        return self._checksums.of(blocks)

    def begin(
        self, key: str, *, kind: CopierKind, peer: KvRank, source_blocks: Sequence[int], target_blocks: Sequence[int]
    ) -> tuple[int, int]:
        """Starts a read; returns its bytes and descriptors. Raises CopierError."""
        reached = self._peer(kind, peer)
        plan = reached.planner.plan(source_blocks, target_blocks)
        if plan.descriptors:
            self._transfers[key] = reached.link.begin(plan)
        return plan.bytes, plan.descriptors

    def advance(self, key: str, bytes_max: int) -> bool:
        """Whether all is there. Raises CopierError: it failed, and is over."""
        transfer = self._transfers.get(key)
        if transfer is None:
            return True
        try:
            done = transfer.advance(bytes_max)
        except CopierError:
            del self._transfers[key]
            raise
        if done:
            del self._transfers[key]
        return done

    def cancel(self, key: str) -> None:
        """Ends a read; nothing writes any more when this returns. Unknown ones are no error."""
        transfer = self._transfers.pop(key, None)
        if transfer is not None:
            transfer.cancel()

    def close(self) -> None:
        """Gives up peers and sockets. Idempotent."""
        for key in list(self._transfers):
            self.cancel(key)
        for peer in self._peers.values():
            peer.link.close()
        self._peers.clear()
        for copier in self._copiers.values():
            copier.close()

    def _peer(self, kind: CopierKind, rank: KvRank) -> _Peer:
        key = (kind, msgspec.msgpack.encode(rank))
        peer = self._peers.pop(key, None)
        if peer is None:
            peer = self._connect(kind, rank)
        self._peers[key] = peer  # the latest used is last
        if len(self._peers) > PEERS_MAX:
            self._peers.pop(next(iter(self._peers))).link.close()
        return peer

    def _connect(self, kind: CopierKind, rank: KvRank) -> _Peer:
        copier = self._copiers.get(kind)
        if copier is None:
            raise CopierError(f"no {kind} copier here")
        try:
            planner = Planner(rank, self.rank)
        except ValueError as error:
            raise CopierError(str(error)) from error
        return _Peer(copier.connect(rank), planner)

    def forget(self, kind: CopierKind, rank: KvRank) -> None:
        """Closes the link to a peer that failed, so that the next read connects anew."""
        peer = self._peers.pop((kind, msgspec.msgpack.encode(rank)), None)
        if peer is not None:
            peer.link.close()


def attempt(work: Callable[[], Any]) -> tuple[str, Any]:
    """Run ``work`` and return a rank's answer to the engine core: an error's sentence, or "" and the result.

    Where ranks are processes of their own, an exception would cross the process boundary as another type.
    """
    try:
        return "", work()
    except _EXPECTED as error:
        return str(error) or type(error).__name__, None
