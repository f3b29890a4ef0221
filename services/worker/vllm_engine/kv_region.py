"""The KV cache of one rank as other engines see it: what its blocks are, and the copiers that work on it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from millrace.contracts.kv import NO_BLOCK, CopierKind, KvPlane, KvRank
from millrace.kvcopy.checksum import BlockChecksums
from millrace.kvcopy.copier_port import Copier, CopierError, CopyPlan, Link, Transfer
from millrace.kvcopy.plan import Planner

from services.worker.vllm_engine.kv_groups import layer_spec
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


def planes(kv_cache_config: Any, layout: str) -> list[list[KvPlane]]:
    """Per group one plane per layer, K and V of a block together, in the order of layers; one for all where blocks come
    first. Padding at the end of a page belongs to it.

    Raises Unplaceable: blocks of a layer are not contiguous.
    """
    if not layout.startswith(_BLOCKWISE):
        raise Unplaceable(f"in layout {layout} a block is not one piece of a layer")
    return [merged(_planes_of(kv_cache_config, group)) for group in kv_cache_config.kv_cache_groups]


def _planes_of(kv_cache_config: Any, group: Any) -> Iterable[KvPlane]:
    for tensor in kv_cache_config.kv_cache_tensors:
        for index, layer in enumerate(tensor.layers):
            if layer in group.layer_names:
                offset = tensor.offset + index * tensor.layer_stride
                page = int(layer_spec(group, layer).page_size_bytes)
                yield KvPlane(offset=offset, stride=tensor.block_stride, bytes=page)


class _Peer(msgspec.Struct):
    link: Link
    planners: list[Planner]


class KvRegion:
    """One rank's KV: offers it, checks it, and reads other engines' into it."""

    def __init__(self, memory: KvMemory, columns: list[list[KvPlane]], copiers: dict[CopierKind, Copier]) -> None:
        """Owns the copiers from now on. Args: columns: planes of the group that each column of a row is of."""
        self._kinds = [planes for index, planes in enumerate(columns) if planes not in columns[:index]]
        self._kind_of_column = [self._kinds.index(planes) for planes in columns]
        kv_planes = [plane for planes in self._kinds for plane in planes]
        self.rank = KvRank(planes=kv_planes, region_bytes=memory.size, device=memory.device)
        self._memory = memory
        self._copiers = copiers
        shared = memory.shared
        self._checksums = [BlockChecksums(shared.view, part) for part in self._parts(self.rank)] if shared else []
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

    def _parts(self, rank: KvRank) -> list[KvRank]:
        """A rank with the planes of each kind of group alone. Raises ValueError: it has not as many planes."""
        if len(rank.planes) != len(self.rank.planes):
            raise ValueError("the two regions have different planes; their fingerprints should have differed")
        left = iter(rank.planes)
        return [msgspec.structs.replace(rank, planes=[next(left) for _ in planes]) for planes in self._kinds]

    def checksums(self, rows: Sequence[Sequence[int]]) -> list[int]:
        """CRC-32C of each row's block; of several, the CRC-32 of theirs."""
        found: list[list[int]] = [[] for _ in rows]
        for kind in range(len(self._kinds)):
            places = [
                (at, block)
                for at, row in enumerate(rows)
                for of, block in zip(self._kind_of_column, row, strict=True)
                if of == kind and block != NO_BLOCK
            ]
            sums = self._sums(kind, [block for _, block in places])
            for (at, _), value in zip(places, sums, strict=True):
                found[at].append(value)
        return [sums[0] if len(sums) == 1 else zlib.crc32(np.array(sums, np.uint32).tobytes()) for sums in found]

    def _sums(self, kind: int, blocks: list[int]) -> list[int]:
        if not self._checksums:
            return self._memory.checksums(self._kinds[kind], blocks)
        return self._checksums[kind].of(blocks)

    def begin(
        self,
        key: str,
        *,
        kind: CopierKind,
        peer: KvRank,
        source_rows: Sequence[Sequence[int]],
        target_rows: Sequence[Sequence[int]],
    ) -> tuple[int, int]:
        """Starts a read; returns its bytes and descriptors. Raises CopierError; ValueError: a row is malformed."""
        reached = self._peer(kind, peer)
        pairs: list[list[tuple[int, int]]] = [[] for _ in self._kinds]
        for here, there in zip(source_rows, target_rows, strict=True):
            for of, source, target in zip(self._kind_of_column, here, there, strict=True):
                if source != NO_BLOCK:
                    pairs[of].append((source, target))
        plans = [
            planner.plan([source for source, _ in blocks], [target for _, target in blocks])
            for planner, blocks in zip(reached.planners, pairs, strict=True)
        ]
        plan = _joined(plans)
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
        if (transfer := self._transfers.pop(key, None)) is not None:
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
        if kind not in self._copiers:
            raise CopierError(f"no {kind} copier here")
        try:
            parts = zip(self._parts(rank), self._parts(self.rank), strict=True)
            planners = [Planner(source, target) for source, target in parts]
        except ValueError as error:
            raise CopierError(str(error)) from error
        return _Peer(self._copiers[kind].connect(rank), planners)

    def forget(self, kind: CopierKind, rank: KvRank) -> None:
        """Closes the link to a peer that failed, so that the next read connects anew."""
        peer = self._peers.pop((kind, msgspec.msgpack.encode(rank)), None)
        if peer is not None:
            peer.link.close()


def _joined(plans: list[CopyPlan]) -> CopyPlan:
    columns = zip(*((plan.source, plan.target, plan.lengths) for plan in plans), strict=True)
    source, target, lengths = (np.concatenate(column) for column in columns)
    return CopyPlan(source=source, target=target, lengths=lengths)


def attempt(work: Callable[[], Any]) -> tuple[str, Any]:
    """Run ``work`` and return a rank's answer to the engine core: an error's sentence, or "" and the result.

    Where ranks are processes of their own, an exception would cross the process boundary as another type.
    """
    try:
        return "", work()
    except _EXPECTED as error:
        return str(error) or type(error).__name__, None
