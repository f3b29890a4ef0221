"""vLLM schedulers that write down what reaches them and what each step computes. Given to vLLM by name.

Relies on: Scheduler.add_request, finish_requests, schedule, update_from_output, _preempt_request; running, waiting,
requests, kv_cache_manager (get_block_ids, block_pool.get_num_free_blocks); SchedulerOutput.num_scheduled_tokens.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from tests.testbed.schedule_recording import Happening, table_checksum, tables_told


def plain_id(request_id: str) -> str:
    """The id as it was given: front ends append ``-<8 hex digits>``."""
    return request_id.rsplit("-", 1)[0]


class StepTimes:
    """From the beginning of a step's scheduling to the end of its outputs' processing: ns, wall clock and processor."""

    __slots__ = ("cpu_ns", "wall_ns")

    def __init__(self, wall_ns: int, cpu_ns: int) -> None:
        self.wall_ns = -wall_ns
        self.cpu_ns = -cpu_ns

    def end(self, wall_ns: int, cpu_ns: int) -> None:
        """Says when it was over."""
        self.wall_ns += wall_ns
        self.cpu_ns += cpu_ns


class _Recorder(Scheduler):  # type: ignore[misc]
    """Mixed into vLLM's schedulers.

    Attributes:
        log: Pairs (happening, request id or nothing), in order.
        steps: One entry per call of ``schedule``: (batch, preempted, free blocks, checksum of tables, waiting).
        times: For each step with a batch.
        seen: Every request that was added, by its plain id.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.log: list[tuple[Happening, str]] = []
        self.steps: list[tuple[Any, ...]] = []
        self.times: list[StepTimes] = []
        self.seen: dict[str, Any] = {}
        self._preempted: list[str] = []
        self._settled = 0

    def add_request(self, request: Any) -> None:
        name = plain_id(request.request_id)
        self.seen[name] = request
        self.log.append((Happening.ADD, name))
        super().add_request(request)

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        cancelled = super().finish_requests(request_ids, finished_status)
        self.log += [(Happening.CANCEL, plain_id(request.request_id)) for request in cancelled]
        return cancelled

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._preempted = []
        times = StepTimes(time.perf_counter_ns(), time.process_time_ns())
        output = super().schedule(*args, **kwargs)
        self.log.append((Happening.SCHEDULE, ""))
        self.steps.append(self._entry(output.num_scheduled_tokens))
        if output.num_scheduled_tokens:
            self.times.append(times)
        return output

    def _entry(self, scheduled: dict[str, int]) -> tuple[Any, ...]:
        computed = {name: self.requests[name].num_computed_tokens for name in scheduled}
        batch = [(plain_id(name), count, computed[name] - count) for name, count in scheduled.items()]
        groups = [self.kv_cache_manager.get_block_ids(request.request_id) for request in self.running]
        tables = [tables_told(tables) for tables in groups]
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        return batch, self._preempted, free, table_checksum(tables), len(self.waiting)

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self._preempted.append(plain_id(request.request_id))
        super()._preempt_request(request, *args, **kwargs)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if scheduler_output.num_scheduled_tokens:
            self.log.append((Happening.SETTLE, ""))
            self.times[self._settled].end(time.perf_counter_ns(), time.process_time_ns())
            self._settled += 1
        return outputs


class RecordingScheduler(_Recorder):
    """The plain scheduler, recording."""


class RecordingAsyncScheduler(_Recorder, AsyncScheduler):  # type: ignore[misc]
    """The scheduler of async scheduling, recording."""
