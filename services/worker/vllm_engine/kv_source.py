"""The giving side: leases and freezes of running requests, inside the engine core.

A running request holds its blocks, and full ones never change: the lease only remembers whether the request has held
them ever since. Those that its window leaves behind are pinned besides. Whatever takes blocks away (preemption, the
end, an abort) ends the lease first. A frozen request is in none of the scheduler's queues: nothing preempts it and
nothing spins for it. Its place in the running batch is kept by lowering the bound for others.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from millrace.actor.clock import unix_ns
from millrace.actor.engine import (
    EndLeaseInEngine,
    FreezeInEngine,
    KvDenied,
    KvLeaseTaken,
    LeaseInEngine,
    SequenceStopped,
    denied,
)
from millrace.contracts.kv import KvRefusal
from vllm.v1.request import Request, RequestStatus

from services.worker.vllm_engine.kv_groups import CacheGroups
from services.worker.vllm_engine.kv_ranks import BlockSampler, Ranks, Summing, settle
from services.worker.vllm_engine.names import sequence_of

#: Lost leases remembered, so that a late renewal hears why. Those older than this have long been given up.
LOST_MAX = 256
_ALL = 1 << 62


@dataclass(slots=True, eq=False)
class RequestLease:
    """One migration's hold on a request.

    Attributes:
        place: Where in the running batch it stood when it was frozen; None while it runs.
        pinned: Ids of blocks that were told and that its window may leave.
        answers: Those still owed.
    """

    migration: str
    request: Request
    place: int | None = None
    pinned: set[int] = field(default_factory=set)
    answers: list[Future[bytes]] = field(default_factory=list)


class RequestLeases:
    """All leases of an engine."""

    def __init__(self, scheduler: Any, groups: CacheGroups, *, verify: float, row_bytes: int, ranks: Ranks) -> None:
        self._scheduler, self._ranks = scheduler, ranks
        self._pool = scheduler.kv_cache_manager.block_pool
        self._groups = groups
        self._sample = BlockSampler(verify)
        self._row_bytes = row_bytes
        self._leases: dict[str, RequestLease] = {}
        self._lost: deque[str] = deque(maxlen=LOST_MAX)

    # --- commands

    def lease(self, command: LeaseInEngine, request_id: str) -> KvDenied | Told:
        """Takes or renews a lease."""
        lease = self._leases.get(command.migration)
        if lease is None:
            request = self._scheduler.requests.get(request_id)
            if command.migration in self._lost:
                return denied(command, KvRefusal.LEASE_LOST)
            if request is None or request.is_finished():
                return denied(command, KvRefusal.UNKNOWN_SEQUENCE)
            if refused := self._refused(command, request):
                return refused
            lease = self._leases[command.migration] = RequestLease(command.migration, request)
        return Told(self, lease, command)

    def _refused(self, command: LeaseInEngine, request: Request) -> KvDenied | None:
        if why := immovable(request):
            return denied(command, KvRefusal.IMMOVABLE, why)
        if self.is_frozen(request):
            return denied(command, KvRefusal.NOT_RUNNING, "it is frozen for another migration")
        if request.status != RequestStatus.RUNNING:
            return denied(command, KvRefusal.NOT_RUNNING, "it waits")
        if not request.num_output_tokens or settled_tokens(request) < request.num_tokens - 1:
            return denied(command, KvRefusal.NOT_RUNNING, "its prompt is not done")
        return None

    def freeze(self, command: FreezeInEngine) -> KvDenied | Told:
        """Takes a leased request out of the running batch; the answer comes when no step of it is under way."""
        lease = self._leases.get(command.migration)
        if lease is None:
            return denied(command, KvRefusal.LEASE_LOST)
        if lease.place is None:
            if self.is_frozen(lease.request):
                return denied(command, KvRefusal.NOT_RUNNING, "it is frozen for another migration")
            running = self._scheduler.running
            lease.place = running.index(lease.request)
            del running[lease.place]
            self._scheduler.max_num_active_reqs -= 1
        return Told(self, lease, command)

    def end(self, command: EndLeaseInEngine) -> None:
        """Lets the request go where it moved; else thaws it where it was frozen."""
        lease = self._leases.get(command.migration)
        if lease is None:
            return
        self._drop(lease, KvRefusal.CANCELLED)
        if command.moved:
            self._scheduler.finish_requests(lease.request.request_id, RequestStatus.FINISHED_ABORTED)
        elif lease.place is not None:
            self._thaw(lease.request, lease.place)

    def _thaw(self, request: Request, place: int) -> None:
        running = self._scheduler.running
        running.insert(place, request)  # at the end, where others have left
        adapters = {other.lora_request for other in running if other.lora_request is not None}
        if len(adapters) > getattr(self._scheduler.lora_config, "max_loras", len(adapters)):
            # Others took its adapter's place in the batch, and vLLM asserts that there is one for each.
            running.remove(request)
            self._scheduler._preempt_request(request, time.monotonic())

    # --- what happens to requests

    def request_gone(self, request: Request) -> None:
        """Its blocks are about to be taken away."""
        for lease in [lease for lease in self._leases.values() if lease.request is request]:
            self._drop(lease, KvRefusal.LEASE_LOST)
            self._lost.append(lease.migration)

    def _drop(self, lease: RequestLease, reason: KvRefusal) -> None:
        del self._leases[lease.migration]
        self._pool.free_blocks([self._pool.blocks[block] for block in lease.pinned])
        if lease.place is not None:
            self._scheduler.max_num_active_reqs += 1
        for answer in lease.answers:
            settle(answer, KvDenied(migration=lease.migration, reason=reason))

    def is_frozen(self, request: Request) -> bool:
        """Whether a request stands still."""
        return any(lease.place is not None and lease.request is request for lease in self._leases.values())

    def frozen(self) -> list[Request]:
        """Requests that stand still: they hold blocks and are in no queue."""
        return [lease.request for lease in self._leases.values() if lease.place is not None]

    # --- what is told

    def rows(self, lease: RequestLease, from_block: int, *, tail: bool) -> list[list[int]]:
        """Rows whose KV is there, from a position on; the partial one and the state only with ``tail``."""
        request = lease.request
        rows = self._groups.rows(request.request_id, from_block, settled_tokens(request), tail=tail)
        leaving = set(self._groups.leaving(rows)) - lease.pinned
        self._pool.touch([self._pool.blocks[block] for block in leaving])
        lease.pinned |= leaving
        return rows

    def summing(self, rows: list[list[int]]) -> Summing:
        """Checksums of these, of as many as are verified."""
        return Summing(self._ranks, rows, row_bytes=self._row_bytes, wanted=self._sample.take(len(rows)))


class Told:
    """An answer owed, worked off between steps: to a lease with the full blocks there are when it is asked for, to a
    freeze with all that is left and every token, when no step of the request is under way.
    """

    def __init__(self, leases: RequestLeases, lease: RequestLease, command: LeaseInEngine | FreezeInEngine) -> None:
        self.answer: Future[bytes] = Future()
        lease.answers.append(self.answer)
        self._leases, self._lease, self._command = leases, lease, command
        self._freezes = isinstance(command, FreezeInEngine)
        self._rows: list[list[int]] = []
        self._summing: Summing | None = None if self._freezes else self._begin()

    def advance(self, bytes_max: int) -> None:
        """Goes on; a lease that was lost meanwhile has answered already."""
        if self.answer.done() or (self._freezes and self._lease.request.num_in_flight_tokens):
            return
        self._summing = self._summing or self._begin()
        # A frozen one's client waits: what its sums cost the others at once is little beside that.
        if self._summing.advance(_ALL if self._freezes else bytes_max):
            self._lease.answers.remove(self.answer)
            settle(self.answer, self._said(self._summing.sums))

    def _begin(self) -> Summing:
        self._rows = self._leases.rows(self._lease, self._command.from_block, tail=self._freezes)
        return self._leases.summing(self._rows)

    def _said(self, sums: list[list[int]]) -> KvLeaseTaken | SequenceStopped:
        request = self._lease.request
        both: dict[str, Any] = {
            "migration": self._lease.migration,
            "sequence": sequence_of(request.request_id),
            "from_block": self._command.from_block,
            "blocks": self._rows,
            "computed_tokens": settled_tokens(request),
            "checksums": sums,
        }
        if self._freezes:
            return SequenceStopped(output_token_ids=list(request._output_token_ids), frozen_ns=unix_ns(), **both)
        prompt, output = request.num_prompt_tokens, request.num_output_tokens
        return KvLeaseTaken(prompt_tokens=prompt, output_tokens=output, **both)


def settled_tokens(request: Request) -> int:
    """Tokens whose KV is in the cache for sure: those of steps whose output was taken."""
    return int(request.num_computed_tokens - request.num_in_flight_tokens)


def immovable(request: Request) -> str:
    """Parts of a request that cannot be carried to another engine; empty where all can.

    All sampling that the contract allows can be carried; the rest could only come from other front ends.
    """
    sampling = request.sampling_params
    if sampling is None:
        return "it is pooled, not sampled"
    found = {
        "prompt log-probabilities": sampling.prompt_logprobs is not None,
        "prompt embeddings": request.prompt_embeds is not None,
        "streamed input": request.resumable,
    }
    return ", ".join(name for name, there in found.items() if there)
