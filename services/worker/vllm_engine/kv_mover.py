"""Everything about moving KV inside the engine core: commands between steps, work spread over steps, the two hooks that
the scheduler gives.

``EngineCore.millrace_move``, ``millrace_kv``, ``millrace_limit_step`` and the others are utilities: vLLM calls
them between steps, so that they see the scheduler's state whole; a Future they return is answered when it is set. vLLM
has no place of its own to register one, so they are set on the class when a scheduler of ours is made, in whatever
process that is.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from millrace.actor.engine import (
    EndLeaseInEngine,
    FreezeInEngine,
    KvDenied,
    KvRoomReserved,
    LeaseInEngine,
    PullIntoEngine,
    ReserveInEngine,
    UnreserveInEngine,
    denied,
)
from millrace.contracts.kv import KvRefusal
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from services.worker.vllm_engine import continuation, kv_words, process
from services.worker.vllm_engine.kv_groups import CacheGroups, described, group_bytes, has_state, unknown_groups
from services.worker.vllm_engine.kv_ranks import Ranks, ReadFailed
from services.worker.vllm_engine.kv_source import RequestLeases, Told
from services.worker.vllm_engine.kv_target import BlockRead, Reservations
from services.worker.vllm_engine.kv_words import KvCall, KvSettings, Offer

#: Ways to draft tokens whose KV, if they keep any, is in groups of the engine: that of a position is there when its
#: token is.
_DRAFTS = ("ngram", "eagle", "eagle3", "mtp", "draft_model")

#: Copied at a time where no sequence waits for the next step: some 10 ms, so that one that comes does not wait long.
IDLE_BYTES = 64 << 20

#: ``copy_bytes_per_step`` is of a step of so many seconds; a longer one has as much more, up to so many times.
STEP_S = 0.01
STEPS_MAX = 32.0
#: Part of a step's time after which the answers that are left wait for the next one.
WORK_SHARE = 0.1


class Mover:
    """RequestLeases and reservations of one engine, and the work for them."""

    def __init__(self, core: Any, settings: KvSettings) -> None:
        self._scheduler = core.scheduler
        self._settings = settings
        groups = CacheGroups(core.scheduler.kv_cache_manager)
        columns = [index for index, group in enumerate(groups.all) for _ in range(group.columns)]
        config = core.scheduler.kv_cache_config.kv_cache_groups
        row_bytes = sum(group_bytes(config[index]) for index in columns)
        self._ranks = Ranks(core.model_executor, columns)
        self._jobs: list[Told | BlockRead] = []
        self._worked_s = time.monotonic()
        self.groups = groups
        summing: dict[str, Any] = {"verify": settings.verify, "row_bytes": row_bytes, "ranks": self._ranks}
        self.leases = RequestLeases(self._scheduler, groups, **summing)
        self.reservations = Reservations(self._scheduler, groups, hasher=core.request_block_hasher, **summing)
        self._give_way(core.scheduler.kv_cache_manager)

    def _give_way(self, cache: Any) -> None:
        """Has replicas give way wherever the scheduler finds no block for a request."""
        allocate = cache.allocate_slots

        def allocate_with_room(request: Request, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
            blocks = allocate(request, num_new_tokens, *args, **kwargs)
            whole = kwargs.get("full_sequence_must_fit")
            hits = kwargs.get("num_new_computed_tokens", 0)
            tokens = request.num_tokens - hits if whole else request.num_computed_tokens + num_new_tokens
            while blocks is None and self.reservations.may_fit(request, tokens) and self.reservations.give_up_newest():
                blocks = allocate(request, num_new_tokens, *args, **kwargs)
            return blocks

        cache.allocate_slots = allocate_with_room

    def handle(self, call: KvCall) -> bytes | Future[bytes]:
        """Carries out a command; the encoded answer, now or later, empty for none."""
        said = self._carry_out(call)
        if isinstance(said, KvDenied | KvRoomReserved):
            return kv_words.encode(said)
        if said is None:
            return b""
        self._jobs.append(said)
        if self._idle():
            self.work()
        return said.answer

    def _carry_out(self, call: KvCall) -> KvDenied | KvRoomReserved | Told | BlockRead | None:
        command = call.command
        match command:
            case LeaseInEngine():
                return self.leases.lease(command, call.request_id)
            case FreezeInEngine():
                return self.leases.freeze(command)
            case EndLeaseInEngine():
                self.leases.end(command)
            case ReserveInEngine():
                return self._reserve(command, call)
            case PullIntoEngine():
                return self.reservations.pull(command)
            case UnreserveInEngine():
                self.reservations.unreserve(command.migration)
        return None

    def _reserve(self, command: ReserveInEngine, call: KvCall) -> KvDenied | KvRoomReserved:
        try:
            copier = self._ranks.reach(command.endpoint, call.copiers)
        except ReadFailed as error:
            return denied(command, KvRefusal.INCOMPATIBLE, str(error))
        return self.reservations.reserve(command, copier, match_prefix=call.match_prefix, lora=call.lora)

    def work(self) -> None:
        """Does a step's share for the answers that are owed, in the order in which they were asked for.

        Shared evenly, the first would be there when the last is: too late for all of them where steps are long. So a
        long step has a larger share, and those that come later wait where the first ones have taken its time.
        """
        now_s = time.monotonic()
        step_s, self._worked_s = now_s - self._worked_s, now_s
        steps = min(max(step_s / STEP_S, 1.0), STEPS_MAX)
        share = IDLE_BYTES if self._idle() else int(steps * self._settings.copy_bytes_per_step)
        for job in self._jobs:
            job.advance(share)
            if time.monotonic() - now_s > WORK_SHARE * steps * STEP_S:
                break
        self._jobs = [job for job in self._jobs if not job.answer.done()]

    def owes(self) -> bool:
        """Whether there is work: the engine must go on stepping."""
        return bool(self._jobs)

    def take_over(self, request: Request, arrival: bytes) -> None:
        """Gives an arriving request its KV."""
        self.reservations.take_over(request, kv_words.decode_arrival(arrival))

    def offer(self) -> Offer:
        """Location of the ranks' KV."""
        return self._ranks.offer()

    def _idle(self) -> bool:
        return not self._scheduler.has_unfinished_requests()


_Base: Any = Scheduler if TYPE_CHECKING else object


class MovingMixin(_Base):
    """A scheduler whose requests can come and go with their KV. Stands behind SnapshotMixin."""

    mover: Mover | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        install()
        settings = self.vllm_config.additional_config.get(kv_words.SETTINGS)
        if settings is not None and self.vllm_config.max_concurrent_batches > 1:
            # A reservation's blocks must not be written any more by a step under way, for a request that had them.
            self.defer_block_free = True

    def add_request(self, request: Request) -> None:
        """Queues a request, one that comes with its KV as far computed as that goes."""
        arrival = continuation.extra(request, kv_words.ARRIVAL)
        if arrival is not None and self.mover is not None and request.request_id not in self.requests:
            self.mover.take_over(request, arrival)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedules a batch, after a share of the work for KV."""
        if self.mover is not None:
            self.mover.work()
        if not self.kv_holding_waiting:
            return super().schedule(*args, **kwargs)
        limits = self.scheduler_config
        threshold = int(limits.long_prefill_token_threshold)
        limits.long_prefill_token_threshold = self._chunk_beside_arrivals(threshold)
        try:
            return super().schedule(*args, **kwargs)
        finally:
            limits.long_prefill_token_threshold = threshold

    def _chunk_beside_arrivals(self, threshold: int) -> int:
        """Most tokens of a prompt that the next step may compute, so that arrivals have their token in it.

        vLLM serves running sequences first, and one whose prompt is being computed takes all that the others leave. An
        arrival would wait until that prompt is done.
        """
        wants = [request.num_tokens_with_spec - request.num_computed_tokens for request in self.running]
        prompts = sum(tokens > 1 for tokens in wants)
        if not prompts:
            return threshold
        arrival = 1 + self.num_spec_tokens  # vLLM pads one that comes to as many tokens as it may draft, or asserts
        others = len(wants) - prompts + len(self.kv_holding_waiting) * arrival
        chunk: int = max(arrival, (self.max_num_scheduled_tokens - others) // prompts)
        return min(threshold or chunk, chunk)

    def yielding_blocks(self) -> int:
        """Blocks that count as free though replicas hold them."""
        return self.mover.reservations.yielding if self.mover is not None else 0

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        if self.mover is not None:
            self.mover.leases.request_gone(request)
        super()._preempt_request(request, *args, **kwargs)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self.mover is not None:
            self.mover.leases.request_gone(request)
        return super()._free_request(request, *args, **kwargs)

    def has_requests(self) -> bool:
        """Whether the engine must step: also where only KV is owed."""
        return bool(super().has_requests()) or (self.mover is not None and self.mover.owes())

    def standing_still(self) -> list[Request]:
        """Frozen requests: they hold blocks and are in no queue."""
        return self.mover.leases.frozen() if self.mover is not None else []


def install() -> None:
    """Makes the utilities known to vLLM's engine core. Idempotent."""
    EngineCore.millrace_move = _move
    EngineCore.millrace_kv = _offer
    EngineCore.millrace_received = _received
    EngineCore.millrace_started = _started
    EngineCore.millrace_limit_step = _limit_step


def _move(core: Any, payload: bytes) -> bytes | Future[bytes]:
    """Utility: an encoded Call in, an encoded KvAnswer out."""
    assert core.scheduler.mover is not None, "millrace_kv first"
    answer: bytes | Future[bytes] = core.scheduler.mover.handle(kv_words.decode_call(payload))
    core.scheduler.write_snapshot()
    return answer


def _limit_step(core: Any, tokens: int) -> None:
    """Utility: bounds the tokens of the next steps."""
    core.scheduler.limit_step(tokens)
    core.scheduler.write_snapshot()


def _received(core: Any, request_id: str) -> int:
    """Utility: answered when every sequence sent before has been added; the tokens of one whose KV it brought."""
    return int(getattr(core.scheduler.requests.get(request_id), kv_words.KV_TOKENS, 0))


def _started(core: Any) -> None:
    """Utility: the first one of all; the engine's threads are there."""
    if current_platform.is_cpu():
        process.part_threads()


def _offer(core: Any) -> bytes:
    """Utility: makes the engine ready to move KV, where it can; an encoded Offer."""
    refusal = unmovable(core.vllm_config, core.scheduler.kv_cache_config)
    if refusal:
        return kv_words.encode(Offer(refusal=refusal))
    config = core.scheduler.kv_cache_config
    settings = kv_words.decode_settings(core.vllm_config.additional_config[kv_words.SETTINGS])
    mover = Mover(core, settings)
    offer = mover.offer()
    if not offer.refusal:
        core.scheduler.mover = mover
        offer = Offer(
            ranks=offer.ranks,
            copiers=offer.copiers,
            layout=_layout(core.vllm_config, config),
            blocks=config.num_blocks,
            block_tokens=mover.groups.block_tokens,
            groups=described(config, len(offer.ranks)),
        )
    return kv_words.encode(offer)


def unmovable(vllm_config: Any, kv_cache_config: Any) -> str:
    """Reasons why an engine of this configuration moves nothing; empty where it can."""
    parallel = vllm_config.parallel_config
    unknown = unknown_groups(kv_cache_config)
    drafts = vllm_config.speculative_config
    found = {
        "migration is off": kv_words.SETTINGS not in vllm_config.additional_config,
        "its layers keep no KV": not kv_cache_config.kv_cache_groups,
        f"its layers keep {unknown}": bool(unknown),
        "KV of some layers is never transferred": not all(
            getattr(group, "enable_kv_transfer", True) for group in kv_cache_config.kv_cache_groups
        ),
        f"it drafts tokens with {drafts and drafts.method}": drafts is not None and drafts.method not in _DRAFTS,
        "it drafts tokens, and its layers keep a state": drafts is not None and has_state(kv_cache_config),
        "it has a KV connector of its own": vllm_config.kv_transfer_config is not None,
        "its layers are spread over pipeline stages": parallel.pipeline_parallel_size > 1,
        "its contexts are spread over ranks": parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
    }
    return "; ".join(reason for reason, true in found.items() if true)


def _layout(vllm_config: Any, kv_cache_config: Any) -> dict[str, str]:
    groups = kv_cache_config.kv_cache_groups
    return {
        "groups": repr([(group.kv_cache_spec, group.layer_names) for group in groups]),
        "layout": vllm_config.cache_config.get_resolved_kv_cache_layout().name,
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "tensor_parallel": str(vllm_config.parallel_config.tensor_parallel_size),
    }
