"""vLLM's scheduler, which besides tells after each step what it knows of every request.

Both classes run inside the engine process; vLLM finds them by their path (``scheduler_cls``). Whom vLLM schedules, and
in which order, is its own decision; how many tokens a step may take is lowered where the worker bounds steps, and for
prompts while sequences come with their KV (README.md, "What replaces vLLM's own").
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import msgspec
from millrace.actor.child_process import die_with_parent
from millrace.actor.clock import unix_ns
from millrace.contracts.status import BatchComposition, EngineSnapshot, SequenceState
from millrace.enginemodel.steps import StepTotals
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutputs
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.request import Request, RequestStatus

from services.worker.vllm_engine import continuation, hangs, metered_grammar, segment_queue, step_limit
from services.worker.vllm_engine.kv_mover import MovingMixin
from services.worker.vllm_engine.kv_source import immovable
from services.worker.vllm_engine.kv_words import KV_TOKENS
from services.worker.vllm_engine.names import sequence_of
from services.worker.vllm_engine.scheduler_config import unbounded_blocks
from services.worker.vllm_engine.snapshot_buffer import SnapshotWriter

#: Key in VllmConfig.additional_config: path of the snapshot buffer.
SNAPSHOT_PATH = "millrace_snapshot_path"
#: Waiting sequences shown in a snapshot; the rest are beyond what any policy looks at.
WAITING_MAX = 4096


#: The mixin stands in front of either scheduler; to the type checker it is one of them.
_Base: Any = MovingMixin if TYPE_CHECKING else object


class SnapshotMixin(_Base):
    """Adds snapshots, step numbers and continuations to a vLLM scheduler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        die_with_parent()
        if self.vllm_config.additional_config.get(segment_queue.SEGMENTS):
            segment_queue.install(self.kv_cache_manager)
        metered_grammar.install(self.structured_output_manager)
        path = self.vllm_config.additional_config[SNAPSHOT_PATH]
        self._step_limit = step_limit.StepLimit(self)
        self._writer = SnapshotWriter(path)
        hangs.start_beating(self._writer)
        self._encoder = msgspec.msgpack.Encoder()
        self._under_way: deque[tuple[int, BatchComposition]] = deque()
        self._steps = 0
        self._preempted = 0
        self._last_end_ns = 0
        self._last_duration_ns = 0
        self._last_batch = BatchComposition()
        self._totals = StepTotals()
        no_cache = self.kv_cache_manager.block_pool.num_gpu_blocks <= 1
        self._unbounded = unbounded_blocks(self.vllm_config) if no_cache else 0
        self.write_snapshot()

    def add_request(self, request: Request) -> None:
        """Queues a request, continued ones with their output restored."""
        if request.request_id not in self.requests:
            continuation.restore_output(request, self.structured_output_manager)
            request.millrace_fixed = _fixed(request)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedules a batch and notes its composition and start."""
        started_ns = time.monotonic_ns()
        output = super().schedule(*args, **kwargs)
        if not self._under_way:
            self._writer.step(started_ns if output.total_num_scheduled_tokens else 0)
        self._under_way.append((started_ns, composition(output, self.requests)))
        for new in output.scheduled_new_reqs:
            self._first_scheduled(new, started_ns)
        return output

    def _first_scheduled(self, new: Any, started_ns: int) -> None:
        request = self.requests[new.req_id]
        request.record_event(EngineCoreEventType.SCHEDULED, started_ns / 1e9)
        if request.num_output_tokens:
            # A continuation: the V1 runner reads here what the V2 runner always gets (see runner.py).
            new.prefill_token_ids = list(request._all_token_ids)
            if request.num_preemptions == 0:
                request.prefill_stats = _stats_of_continuation(request, new.num_computed_tokens)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self._preempted += 1
        request.record_event(EngineCoreEventType.PREEMPTED)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        """Takes a step's result, writes the snapshot, and sends the step's number with the outputs."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        started_ns, batch = self._under_way.popleft()
        self._writer.step(self._under_way[0][0] if self._under_way else 0)
        if scheduler_output.total_num_scheduled_tokens > 0:
            now_ns = time.monotonic_ns()
            self._steps += 1
            self._last_duration_ns = now_ns - max(started_ns, self._last_end_ns)
            self._last_end_ns = now_ns
            self._last_batch = batch
            self._totals.add(batch, self._last_duration_ns)
        self.write_snapshot()
        message = outputs.get(0)
        if message is None:
            outputs[0] = message = EngineCoreOutputs()
        if message.scheduler_stats is None:
            message.scheduler_stats = SchedulerStats()
        message.scheduler_stats.step_counter = self._steps
        return outputs

    def limit_step(self, tokens: int) -> None:
        """Bounds the tokens of the next steps; 0 for the engine's own budget."""
        self._step_limit.set(tokens)

    def budget_in_force(self) -> int:
        """Bound of the next steps; 0 for none."""
        return self._step_limit.tokens

    def write_snapshot(self) -> None:
        """Writes the state as it is now into shared memory."""
        pool, unbounded = self.kv_cache_manager.block_pool, self._unbounded
        managers = self.kv_cache_manager.coordinator.single_type_managers
        waiting = islice(chain(self.kv_holding_waiting, self.waiting), WAITING_MAX)
        snapshot = (
            self._steps,
            unix_ns(),
            _entries(chain(self.running, self.standing_still()), managers),
            _entries(waiting, managers),
            unbounded or pool.get_num_free_blocks() + self.yielding_blocks(),
            unbounded or pool.num_gpu_blocks - 1,  # block 0 is vLLM's null block and never free
            self._preempted,
            self._last_duration_ns,
            self._last_batch,
            self._totals.totals(),
            self.budget_in_force(),
        )
        self._writer.write(self._encoder.encode(snapshot))


class SnapshotScheduler(SnapshotMixin, MovingMixin, Scheduler):
    """For engines that schedule one step at a time: the CPU."""

    max_num_scheduled_tokens: int

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedules a batch. On a CPU a prompt that is alone is computed in pieces too (see startup.PIECE_TOKENS): vLLM
        bounds those of several alone.
        """
        piece = int(self.scheduler_config.long_prefill_token_threshold)
        budget = self.max_num_scheduled_tokens
        if len(self.requests) > 1 or not piece or not current_platform.is_cpu():
            return super().schedule(*args, **kwargs)
        self.max_num_scheduled_tokens = min(piece, budget)
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.max_num_scheduled_tokens = budget


class SnapshotAsyncScheduler(SnapshotMixin, MovingMixin, AsyncScheduler):
    """For engines that schedule ahead of the GPU; with the plain class vLLM would give that up."""


_STATES = {RequestStatus.RUNNING: str(SequenceState.RUNNING), RequestStatus.PREEMPTED: str(SequenceState.PREEMPTED)}
_WAITING = str(SequenceState.WAITING)


def _fixed(request: Request) -> tuple[Any, ...]:
    """Fields of an entry that no step changes, built once: snapshots are taken every step. Estimates replace them."""
    arrival_ns = int(request.arrival_time * 1e9)
    return (
        sequence_of(request.request_id),
        request.num_prompt_tokens,
        request.max_tokens,
        arrival_ns,
        continuation.extra(request, continuation.EXPECTED_TOKENS),
        immovable(request),
        None,
        None,
    )


def _entries(requests: Iterable[Request], managers: Any) -> list[tuple[Any, ...]]:
    """Sequences in the field order of SequenceStatus."""
    return [_entry(request, sum(_blocks(request, manager) for manager in managers)) for request in requests]


def _blocks(request: Request, manager: Any) -> int:
    """Blocks of one group, but for places in its table that a window or a state has left."""
    held = len(manager.req_to_blocks.get(request.request_id, ()))
    left = manager.get_num_skipped_tokens(request.num_computed_tokens - request.num_in_flight_tokens)
    return max(0, held - max(0, left) // manager.block_size) if held else 0


def _entry(request: Request, blocks: int) -> tuple[Any, ...]:
    sequence, prompt_tokens, max_tokens, arrival_ns, *expected = request.millrace_fixed
    return (
        sequence,
        _STATES.get(request.status, _WAITING),
        prompt_tokens,
        request.num_computed_tokens,
        len(request._output_token_ids),
        max_tokens,
        blocks,
        arrival_ns,
        *expected,
    )


def _stats_of_continuation(request: Request, cached_tokens: int) -> PrefillStats:
    """Prefix hits of a continuation, which may reach into its earlier output, no more than the prompt is told; and the
    tokens whose KV it brought.
    """
    stats = PrefillStats()
    stats.set(
        num_prompt_tokens=request.num_prompt_tokens,
        num_local_cached_tokens=min(cached_tokens, request.num_prompt_tokens),
        num_external_cached_tokens=0,
    )
    stats.num_external_cached_tokens = getattr(request, KV_TOKENS, 0)
    return stats


class _Wire(EngineSnapshot, frozen=True, kw_only=True, array_like=True):
    """EngineSnapshot as it lies in the buffer: values in field order, no names."""


_decoder = msgspec.msgpack.Decoder(_Wire)


def decode_snapshot(payload: bytes) -> EngineSnapshot:
    """Reads what ``write_snapshot`` wrote."""
    wire = _decoder.decode(payload)
    return EngineSnapshot(**{field: getattr(wire, field) for field in _Wire.__struct_fields__})


def composition(output: SchedulerOutput, requests: dict[str, Request]) -> BatchComposition:
    """Composition of a batch that will be computed. Call right after it was scheduled."""
    decodes = prefills = prefill_tokens = context = prefill_context = longest = 0
    work = 0.0
    scheduled = output.num_scheduled_tokens
    cached = output.scheduled_cached_reqs
    befores = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
    befores.extend(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    for identity, before in befores:
        count = scheduled[identity]
        context += before + count
        request = requests[identity]
        if count == 1 and before >= request.num_prompt_tokens and before + 1 >= request.num_tokens:
            decodes += 1
            longest = max(longest, before + count)
        else:
            prefills += 1
            prefill_context += before + count
            prefill_tokens += count
            work += count * (before + count / 2)
    return BatchComposition(decodes, prefills, prefill_tokens, context, work, prefill_context, longest)
