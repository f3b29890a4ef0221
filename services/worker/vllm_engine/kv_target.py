"""The taking side: reservations, reads into them, and the request that takes one over, inside the engine core.

A request that arrives with its KV is queued as one whose asynchronous KV load is done: it holds blocks and has computed
tokens, which vLLM's scheduler handles without a connector. Blocks enter the prefix cache when the request takes them
over and not before: only then is it known that the source held them until all was read.

A KV replica is a reservation that takes no place in the batch, grows with what is read, and is given up as soon as a
request or another reservation lacks blocks.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from millrace.actor.clock import unix_ns
from millrace.actor.engine import (
    KvBlocksRead,
    KvDenied,
    KvRoomReserved,
    PullIntoEngine,
    ReserveInEngine,
    denied,
)
from millrace.contracts.kv import UNSUMMED, CopierKind, KvEndpoint, KvRefusal
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from services.worker.vllm_engine.kv_groups import CacheGroups, ReservedBlocks
from services.worker.vllm_engine.kv_ranks import Ranks, ReadFailed, Summing, settle
from services.worker.vllm_engine.kv_words import KV_TOKENS, TimedHandover
from services.worker.vllm_engine.names import sequence_of
from services.worker.vllm_engine.segment_queue import new_blocks

#: The tail is read at once: there is no step of the request to go on meanwhile.
_ALL = 1 << 62
_LATE = "the read took longer than the lease"


@dataclass(slots=True, eq=False)
class BlockReservation:
    """Blocks for a request to come.

    Attributes:
        positions: For so many there is room.
        matched: Positions below this came from the prefix cache.
        good: Positions that hold the sequence's KV: matched, or read and found right.
    """

    migration: str
    sequence: str
    token_ids: list[int]
    endpoint: KvEndpoint
    copier: CopierKind
    blocks: ReservedBlocks
    positions: int
    matched: int
    good: set[int]
    replica: bool = False
    reading: BlockRead | None = None

    def good_prefix(self) -> int:
        """Positions from the first on whose KV is there."""
        return next(position for position in range(len(self.good) + 1) if position not in self.good)


class Reservations:
    """All reservations of an engine."""

    def __init__(
        self,
        scheduler: Any,
        groups: CacheGroups,
        *,
        hasher: Any,
        verify: float,
        row_bytes: int,
        ranks: Ranks,
    ) -> None:
        self._scheduler = scheduler
        self.groups = groups
        self.ranks = ranks
        self._pool = scheduler.kv_cache_manager.block_pool
        self._hasher = hasher
        self.verify = verify
        self.row_bytes = row_bytes
        self._held: dict[str, BlockReservation] = {}

    # --- reserve

    def reserve(
        self, command: ReserveInEngine, copier: CopierKind, *, match_prefix: bool, lora: LoRARequest | None = None
    ) -> KvDenied | KvRoomReserved:
        """Takes free blocks, the prefix's own among them."""
        if command.migration in self._held:
            return denied(command, KvRefusal.INVALID, "reserved already")
        if command.blocks < 1:
            return denied(command, KvRefusal.INVALID, f"{command.blocks} blocks wanted")
        replica = command.replica
        here = len(self._scheduler.running) + len(self._scheduler.kv_holding_waiting)
        if not replica and here >= self._scheduler.max_num_active_reqs:
            return denied(command, KvRefusal.NO_BLOCKS, "the batch has no place left")
        blocks = ReservedBlocks(self.groups, self._pool, new_blocks)
        matched = self._match(blocks, command, lora) if match_prefix else 0
        counts = [max(0, count) for count in blocks.lacks(command.blocks * self.groups.block_tokens)]
        wanted = sum(counts)
        if not (wanted <= self._pool.get_num_free_blocks() if replica else self._make_room(wanted)):
            blocks.free()
            free = self._pool.get_num_free_blocks()
            return denied(command, KvRefusal.NO_BLOCKS, f"{wanted} blocks wanted, {free} free")
        blocks.take(counts)
        self._held[command.migration] = BlockReservation(
            migration=command.migration,
            sequence=command.sequence,
            token_ids=command.token_ids,
            endpoint=command.endpoint,
            copier=copier,
            blocks=blocks,
            positions=command.blocks,
            matched=matched,
            good=set(range(matched)),
            replica=replica,
        )
        self._scheduler.max_num_active_reqs -= not replica
        return KvRoomReserved(migration=command.migration, matched_blocks=matched, copier=copier)

    def _match(self, blocks: ReservedBlocks, command: ReserveInEngine, lora: LoRARequest | None) -> int:
        """Takes what the prefix cache has; returns positions."""
        if self._hasher is None or len(command.token_ids) < 2:
            return 0
        probe = Request("", command.token_ids, SamplingParams(), None, lora_request=lora, block_hasher=self._hasher)
        found, tokens, _ = self._scheduler.kv_cache_manager.get_computed_blocks(probe)
        matched = min(tokens // self.groups.block_tokens, command.blocks)
        if matched:
            blocks.match(found.blocks, matched)
        return int(matched)

    # --- replicas

    @property
    def yielding(self) -> int:
        """Blocks of replicas, which are free as soon as anything else needs them; not those that a prefix shares."""
        matched = self.groups.width
        return sum(max(0, len(held.blocks) - held.matched * matched) for held in self._held.values() if held.replica)

    def may_fit(self, request: Request, tokens: int) -> bool:
        """Whether a request could have blocks for so many tokens, prefix hits apart, without replicas. Where it could
        not, giving them up gains nothing.
        """
        held = sum(group.held(request.request_id, request.num_computed_tokens) for group in self.groups.all)
        missing = self.groups.blocks_for(tokens) - held
        return bool(missing <= self._pool.get_num_free_blocks() + self.yielding)

    def give_up_newest(self) -> bool:
        """Free the newest replica's blocks. Returns whether there was one."""
        newest = next((held for held in reversed(self._held.values()) if held.replica), None)
        if newest is None:
            return False
        self.unreserve(newest.migration)
        return True

    def _make_room(self, blocks: int) -> bool:
        """Give up replicas until so many blocks are free, if that is enough. Returns whether they are free."""
        if blocks > self._pool.get_num_free_blocks() + self.yielding:
            return False
        while blocks > self._pool.get_num_free_blocks() and self.give_up_newest():
            pass
        return bool(blocks <= self._pool.get_num_free_blocks())

    # --- pull

    def pull(self, command: PullIntoEngine) -> KvDenied | BlockRead:
        """Begins to read blocks into a reservation."""
        held = self._held.get(command.migration)
        if held is None:
            return denied(command, KvRefusal.INVALID, "no such reservation")
        if held.reading is not None:
            return denied(command, KvRefusal.INVALID, "it is read into already")
        end = command.from_block + len(command.blocks)
        if held.replica:
            held.positions = max(held.positions, end)
        if not 0 <= command.from_block <= end <= held.positions:
            return denied(command, KvRefusal.INVALID, f"only {held.positions} positions are reserved")
        if any(len(row) != self.groups.width for row in command.blocks):
            return denied(command, KvRefusal.INVALID, f"a row here names {self.groups.width} blocks")
        missing = held.blocks.lacks_for(command.from_block, command.blocks)
        if not (missing <= self._pool.get_num_free_blocks() if held.replica else self._make_room(missing)):
            return denied(command, KvRefusal.NO_BLOCKS, f"{missing} blocks more wanted")
        held.reading = BlockRead(self, held, command)
        return held.reading

    # --- the end of a reservation

    def unreserve(self, migration: str) -> None:
        """Frees a reservation that nobody took over."""
        if (held := self._end(migration)) is not None:
            held.blocks.free()

    def _end(self, migration: str) -> BlockReservation | None:
        """Ends a reservation and what is read into it; its blocks are the caller's."""
        held = self._held.pop(migration, None)
        if held is None:
            return None
        self._scheduler.max_num_active_reqs += not held.replica
        if held.reading is not None:
            self.ranks.cancel(migration)
            settle(held.reading.answer, KvDenied(migration=migration, reason=KvRefusal.CANCELLED))
        return held

    def take_over(self, request: Request, arrival: TimedHandover) -> None:
        """Gives a request that is about to be queued its reservation, after the rest was read.

        What cannot be read in time, or fails its check, is computed anew: the request then begins where the good
        blocks end. Without a single good one it is an ordinary continuation.
        """
        held = self._end(arrival.handover.migration)
        if held is None:
            return
        tokens = 0
        if self._is_for(held, request):
            tokens = max(0, min(arrival.handover.computed_tokens, request.num_tokens - 1))
            self._read_rest(held, arrival, self.groups.needed(tokens))
            if tokens == arrival.handover.computed_tokens or not self.groups.has_state:
                tokens = held.blocks.reach(tokens, held.good_prefix())
            else:
                tokens = 0
        # Who waits with its blocks is preempted by nobody: without room for all its tokens it might wait for ever.
        if tokens and self._make_room(held.blocks.lacks_to_settle(tokens, self._first_step(request))):
            self._adopt(request, held, tokens)
        else:
            held.blocks.free()

    def _is_for(self, held: BlockReservation, request: Request) -> bool:
        """Whether the blocks are of this sequence: what was matched and pulled is of the tokens told at reserving."""
        known = min(len(held.token_ids), request.num_tokens)
        same = held.token_ids[:known] == request._all_token_ids[:known]
        return same and sequence_of(request.request_id) == held.sequence

    def _read_rest(self, held: BlockReservation, arrival: TimedHandover, needed: int) -> None:
        """Reads the blocks that the handover names and nobody has pulled; at once, for nothing else can go on."""
        handover = arrival.handover
        first = max(handover.from_block, held.good_prefix())
        skipped = first - handover.from_block
        blocks = handover.blocks[skipped : max(skipped, needed - handover.from_block)]
        if not blocks or any(len(row) != self.groups.width for row in blocks):
            return
        if not self._make_room(held.blocks.lacks_for(first, blocks)):
            return
        command = PullIntoEngine(
            migration=held.migration,
            from_block=first,
            blocks=blocks,
            checksums=[sums[skipped : skipped + len(blocks)] for sums in handover.checksums],
            until_ns=arrival.until_ns,
        )
        BlockRead(self, held, command).advance(_ALL)

    def _first_step(self, request: Request) -> int:
        """Tokens of it after its first step, drafted ones with them."""
        return int(min(request.num_tokens + self._scheduler.num_spec_tokens, self._scheduler.max_model_len))

    def _adopt(self, request: Request, held: BlockReservation, tokens: int) -> None:
        tables = held.blocks.settle(tokens, self._first_step(request))
        for group, table in zip(self.groups.all, tables, strict=True):
            group.manager.req_to_blocks[request.request_id] = table
            named = min(held.matched * group.columns, tokens // group.block_tokens)
            group.manager.num_cached_block[request.request_id] = named
        self._scheduler.kv_cache_manager.cache_blocks(request, tokens)
        request.num_computed_tokens = tokens
        setattr(request, KV_TOKENS, tokens)


class BlockRead:
    """One read: copies, compares, tells."""

    def __init__(self, reservations: Reservations, held: BlockReservation, command: PullIntoEngine) -> None:
        self.answer: Future[bytes] = Future()
        self._ranks, self._row_bytes = reservations.ranks, reservations.row_bytes
        self._held, self._command = held, command
        skipped = max(0, held.matched - command.from_block)
        self._positions = range(command.from_block + skipped, command.from_block + len(command.blocks))
        self._sources = command.blocks[skipped:]
        self._targets = held.blocks.place(command.from_block + skipped, self._sources)
        #: Checksums by the source of the blocks that are read.
        self._told = [sums[skipped:] for sums in command.checksums] if reservations.verify else []
        self._began_ns = 0
        self._bytes = self._descriptors = 0
        self._comparing: Summing | None = None

    def advance(self, bytes_max: int) -> None:
        """Goes on; answers when it is done or has failed."""
        if self.answer.done():
            return
        try:
            if self._advance(bytes_max):
                self._end()
            elif unix_ns() > self._command.until_ns:
                self._ranks.cancel(self._held.migration)
                self._fail(KvRefusal.LEASE_LOST, _LATE)
        except ReadFailed as error:
            self._fail(KvRefusal.COPY_FAILED, str(error))

    def _advance(self, bytes_max: int) -> bool:
        if not self._began_ns:
            self._begin()
        if self._comparing is None:
            if not self._ranks.advance(self._held.migration, bytes_max):
                return False
            wanted = [UNSUMMED not in sums for sums in zip(*self._told, strict=False)]
            self._comparing = Summing(self._ranks, self._targets, row_bytes=self._row_bytes, wanted=wanted)
        return self._comparing.advance(bytes_max)

    def _begin(self) -> None:
        self._began_ns = unix_ns()
        held = self._held
        held.good.difference_update(self._positions)  # what is read again is garbage until it is read
        if self._sources:
            self._bytes, self._descriptors = self._ranks.begin(
                held.migration,
                kind=held.copier,
                peer=held.endpoint,
                source_rows=self._sources,
                target_rows=self._targets,
            )

    def _end(self) -> None:
        assert self._comparing is not None
        ended_ns = unix_ns()
        if self._comparing.sums and self._comparing.sums != self._told:
            self._fail(KvRefusal.COPY_FAILED, "a block's checksum does not match")
        elif ended_ns > self._command.until_ns:
            self._fail(KvRefusal.LEASE_LOST, _LATE)
        else:
            self._held.good.update(self._positions)
            read = KvBlocksRead(
                migration=self._held.migration,
                from_block=self._command.from_block,
                blocks=len(self._command.blocks),
                bytes=self._bytes,
                descriptors=self._descriptors,
                duration_ns=ended_ns - self._began_ns,
                copier=self._held.copier,
            )
            self._answer(read)

    def _fail(self, reason: KvRefusal, detail: str) -> None:
        self._answer(denied(self._command, reason, detail))

    def _answer(self, said: KvBlocksRead | KvDenied) -> None:
        self._held.reading = None
        settle(self.answer, said)
