"""A CPU engine that estimates remaining lengths from hidden states: it is one where a head lies beside the model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from millrace.lengths.coverage import JudgedEstimates
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from services.worker.vllm_engine import continuation
from services.worker.vllm_engine.hidden_states import ROWS, ReadingMixin, RowEstimates, reader_of
from services.worker.vllm_engine.runner import ContinuingCPUModelRunner, ContinuingCPUWorker, adopt
from services.worker.vllm_engine.snapshot_scheduler import SnapshotScheduler

logger = init_logger(__name__)
_Base: Any = SnapshotScheduler if TYPE_CHECKING else object


class ReadingCPUModelRunner(ReadingMixin, ContinuingCPUModelRunner):
    """The CPU's V1 runner whose states are read before it samples."""

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Samples; the rows whose turn it is go with the output."""
        reader = self.millrace_reader
        rows = self.millrace_rows() if reader is not None else None
        output = super().sample_tokens(grammar_output)
        return output if reader is None or rows is None else reader.finish(rows, output)


class ReadingCPUWorker(ContinuingCPUWorker):
    """The CPU worker with that runner."""

    def init_device(self) -> None:
        super().init_device()
        adopt(self.model_runner, ContinuingCPUModelRunner, ReadingCPUModelRunner)
        self.model_runner.millrace_reader = reader_of(self.vllm_config)


class EstimatingMixin(_Base):
    """A scheduler whose requests get the length that is estimated of them as their expected one, while estimates prove
    right.

    Attributes:
        ignored: Rows whose state was no number.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ignored = 0
        self._judged = JudgedEstimates()
        self._refusal = ""

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        """Takes a step's result, its rows first, for which its tokens are yet to come."""
        if (rows := getattr(model_runner_output, ROWS, None)) is not None:
            self.take(rows)
        return super().update_from_output(scheduler_output, model_runner_output)

    def take(self, rows: RowEstimates) -> None:
        """Takes what a step's rows gave."""
        for name, generated, rest in zip(rows.requests, rows.generated, rows.rests, strict=False):
            request = self.requests.get(name)
            if request is not None and not rows.wrong:  # None: aborted while the step ran
                self._expect(request, generated, rest)

    def _expect(self, request: Any, generated: int, rest: list[float]) -> None:
        p50, p90 = rest
        if not (math.isfinite(p50) and math.isfinite(p90)):
            self.ignored += 1
            return
        sequence, prompt, bound, arrival, _, place, *_ = request.millrace_fixed
        median = max(1, round(p50))
        told = self._judged.told(
            request.request_id, at=generated, p50=median, p90=max(median, math.ceil(p90)), left=bound - generated
        )
        submitted = continuation.extra(request, continuation.EXPECTED_TOKENS)
        expected = (submitted, place, None, None) if told is None else (told[0], place, told[1], generated)
        request.millrace_fixed = (sequence, prompt, bound, arrival, *expected)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        ended = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        self._judged.left(request.request_id, request.num_output_tokens, ended=ended)
        before, self._refusal = self._refusal, self._judged.coverage.refusal
        if bool(before) != bool(self._refusal):
            logger.warning("estimates from hidden states: %s", self._refusal or "believed again")
        return super()._free_request(request, *args, **kwargs)


class EstimatingScheduler(EstimatingMixin, SnapshotScheduler):
    """For engines that schedule a step when the one before has ended."""
