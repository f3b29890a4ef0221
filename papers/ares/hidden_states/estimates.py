"""Use of estimates from hidden states in the engine core: they become a request's expected length, and where states
are recorded, what became of the request is written beside them.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.kvcopy.weights import weights_fingerprint
from millrace.lengths.frames import FrameWriter
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from papers.ares.hidden_states.coverage import JudgedEstimates
from papers.ares.hidden_states.reader import ROWS, RowEstimates, settings_of
from papers.ares.hidden_states.recorded import SequenceStates, StateReservoir, StatesHeader, state_writer
from services.worker.vllm_engine import continuation
from services.worker.vllm_engine.snapshot_scheduler import SnapshotAsyncScheduler, SnapshotScheduler

logger = init_logger(__name__)

#: Requests whose states are kept at a time; further ones are not recorded.
RECORDED_MAX = 1_024
_SEED = 7


class Estimates:
    """Estimates and recorded states of one engine's requests.

    Attributes:
        ignored: Rows whose state was no number.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.ignored = 0
        self._record = settings_of(vllm_config).record
        self._judged = JudgedEstimates()
        self._refusal = ""
        self._model = vllm_config.model_config
        self._rng = random.Random(_SEED)
        self._kept: dict[str, StateReservoir] = {}
        self._writer: FrameWriter | None = None

    def take(self, rows: RowEstimates, requests: dict[str, Request]) -> None:
        """Takes what a step's rows gave. Call before the step's tokens are appended."""
        if rows.wrong:
            self._kept.clear()
            return
        for index, name in enumerate(rows.requests):
            request = requests.get(name)
            if request is None:
                continue  # aborted while the step ran
            if rows.rests:
                self._expect(request, rows.generated[index], rows.rests[index])
            if rows.states:
                self._keep(name, rows.generated[index], rows.states[index])

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

    def _keep(self, name: str, generated: int, state: bytes) -> None:
        reservoir = self._kept.get(name)
        if reservoir is None:
            if len(self._kept) >= RECORDED_MAX:
                return
            reservoir = self._kept[name] = StateReservoir(self._rng)
        reservoir.offer(generated, state)

    def gone(self, request: Request) -> None:
        """A request leaves the engine: its states are written where it ended here by itself or at its bound."""
        ended = request.status == RequestStatus.FINISHED_STOPPED
        over = ended or request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        self._judged.left(request.request_id, request.num_output_tokens, ended=over)
        before, self._refusal = self._refusal, self._judged.coverage.refusal
        if bool(before) != bool(self._refusal):
            logger.warning("estimates from hidden states: %s", self._refusal or "believed again")
        reservoir = self._kept.pop(request.request_id, None)
        if reservoir is None or not over:
            return
        generated, states = reservoir.taken()
        if self._writer is None:
            width = len(states) // len(generated) // 2
            name, fingerprint = str(self._model.served_model_name), weights_fingerprint(self._model.model)
            header = StatesHeader(model=name, fingerprint=fingerprint or self._model.model, hidden_size=width)
            self._writer = state_writer(Path(self._record), header)
        kept = SequenceStates(
            list(request.prompt_token_ids or ()),
            request.num_output_tokens,
            ended,
            request.max_tokens,
            continuation.extra(request, continuation.EXPECTED_TOKENS) or 0,
            generated,
            states,
        )
        self._writer.append([kept])


_Base: Any = SnapshotScheduler if TYPE_CHECKING else object


class EstimatingMixin(_Base):
    """A scheduler that takes estimates and tells ends."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.estimates = Estimates(self.vllm_config)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        """Takes a step's result, its rows first."""
        if (rows := getattr(model_runner_output, ROWS, None)) is not None:
            self.estimates.take(rows, self.requests)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self.estimates.gone(request)
        return super()._free_request(request, *args, **kwargs)


class EstimatingScheduler(EstimatingMixin, SnapshotScheduler):
    """For engines that schedule a step when the one before has ended."""


class EstimatingAsyncScheduler(EstimatingMixin, SnapshotAsyncScheduler):
    """For engines that schedule ahead."""
