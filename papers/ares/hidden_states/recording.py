"""A CPU engine's scheduler that keeps hidden states with what became of their requests.

[models.groups.settings.engine_args]
worker_cls = "services.worker.vllm_engine.reading.ReadingCPUWorker"
scheduler_cls = "papers.ares.hidden_states.recording.RecordingScheduler"
additional_config.remaining.record = "FILE"
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from millrace.kvcopy.weights import weights_fingerprint
from millrace.lengths.frames import FrameWriter
from vllm.v1.request import Request, RequestStatus

from papers.ares.hidden_states.recorded import SequenceStates, StateReservoir, StatesHeader, state_writer
from services.worker.vllm_engine import continuation
from services.worker.vllm_engine.hidden_states import RowEstimates, settings_of
from services.worker.vllm_engine.reading import EstimatingScheduler

#: Requests whose states are kept at a time; further ones are not recorded.
RECORDED_MAX = 1_024
_SEED = 7


class RecordingScheduler(EstimatingScheduler):
    """Estimates too, where there is a head."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._record = settings_of(self.vllm_config).record
        self._rng = random.Random(_SEED)
        self._kept: dict[str, StateReservoir] = {}
        self._states_writer: FrameWriter | None = None

    def take(self, rows: RowEstimates) -> None:
        """Takes a step's rows, and drops all states where they are not those of their requests."""
        super().take(rows)
        if rows.wrong:
            self._kept.clear()
            return
        for name, generated, state in zip(rows.requests, rows.generated, rows.states, strict=False):
            if name in self.requests:
                self._keep(name, generated, state)

    def _keep(self, name: str, generated: int, state: bytes) -> None:
        reservoir = self._kept.get(name)
        if reservoir is None:
            if len(self._kept) >= RECORDED_MAX:
                return
            reservoir = self._kept[name] = StateReservoir(self._rng)
        reservoir.offer(generated, state)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._write(request)
        return super()._free_request(request, *args, **kwargs)

    def _write(self, request: Request) -> None:
        """Writes states where the request ended here by itself or at its bound."""
        reservoir = self._kept.pop(request.request_id, None)
        ended = request.status == RequestStatus.FINISHED_STOPPED
        if reservoir is None or not (ended or request.status == RequestStatus.FINISHED_LENGTH_CAPPED):
            return
        generated, states = reservoir.taken()
        if self._states_writer is None:
            model = self.vllm_config.model_config
            width = len(states) // len(generated) // 2
            name, fingerprint = str(model.served_model_name), weights_fingerprint(model.model)
            header = StatesHeader(model=name, fingerprint=fingerprint or model.model, hidden_size=width)
            self._states_writer = state_writer(Path(self._record), header)
        kept = SequenceStates(
            list(request.prompt_token_ids or ()),
            request.num_output_tokens,
            ended,
            request.max_tokens,
            continuation.extra(request, continuation.EXPECTED_TOKENS) or 0,
            generated,
            states,
        )
        self._states_writer.append([kept])
