"""Use of estimates from hidden states in the engine core: they become a request's expected length, and where states
are recorded, what became of the request is written beside them.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from millrace.lengths.frames import FrameWriter
from millrace.lengths.states import SequenceStates, StateReservoir, StatesHeader, state_writer
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from services.worker.vllm_engine import continuation
from services.worker.vllm_engine.length_head_reader import STATES, Proof, RowEstimates, StateSettings, unreadable

#: Requests whose states are kept at a time; further ones are not recorded.
RECORDED_MAX = 1_024
_SEED = 7


class Estimates:
    """Estimates and recorded states of one engine's requests.

    Attributes:
        ignored: Rows whose state was no number.
    """

    def __init__(self, settings: StateSettings, model: str) -> None:
        self.settings = settings
        self.ignored = 0
        self._rng = random.Random(_SEED)
        self._kept: dict[str, StateReservoir] = {}
        self._writer: FrameWriter | None = None
        self._model = model

    def take(self, rows: RowEstimates, requests: dict[str, Request]) -> None:
        """Takes what a step's rows gave. Call before the step's tokens are appended."""
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
        expected = generated + max(1, round(p50))
        sequence, prompt, bound, arrival, _, place, *_ = request.millrace_fixed
        p90_total = max(expected, generated + math.ceil(p90))
        request.millrace_fixed = (sequence, prompt, bound, arrival, expected, place, p90_total, generated)

    def _keep(self, name: str, generated: int, state: bytes) -> None:
        reservoir = self._kept.get(name)
        if reservoir is None:
            if len(self._kept) >= RECORDED_MAX:
                return
            reservoir = self._kept[name] = StateReservoir(self._rng)
        reservoir.offer(generated, state)

    def gone(self, request: Request) -> None:
        """A request leaves the engine: its states are written where it ended here by itself or at its bound."""
        reservoir = self._kept.pop(request.request_id, None)
        ended = request.status == RequestStatus.FINISHED_STOPPED
        if reservoir is None or not (ended or request.status == RequestStatus.FINISHED_LENGTH_CAPPED):
            return
        generated, states = reservoir.taken()
        if self._writer is None:
            width = len(states) // len(generated) // 2
            header = StatesHeader(model=self._model, fingerprint=self.settings.fingerprint, hidden_size=width)
            self._writer = state_writer(Path(self.settings.record), header)
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


def begin(core: Any) -> str:
    """Utility: loads the head on every rank and begins the self-test; why nothing is read, or nothing."""
    payload = core.vllm_config.additional_config.get(STATES)
    if payload is None:
        return "no head is there"
    if refusal := unreadable(core.vllm_config):
        return refusal
    answers: list[str] = core.model_executor.collective_rpc("millrace_states_begin", args=(payload.encode(),))
    return next((answer for answer in answers if answer), "")


def prove(core: Any, failure: str) -> str:
    """Utility: ends the self-test; why nothing is read, or nothing. ``failure``: why the test came to no end."""
    answers = core.model_executor.collective_rpc("millrace_states_proof", args=(not failure,))
    proof = msgspec.json.decode(answers[0], type=Proof)
    if failure:
        return failure
    if not proof.rows:
        return "the self-test saw no state"
    if proof.wrong:
        return f"the self-test found {proof.wrong} of {proof.rows} states that are not those of their requests"
    settings = msgspec.json.decode(core.vllm_config.additional_config[STATES], type=StateSettings)
    core.scheduler.estimates = Estimates(settings, str(core.vllm_config.model_config.served_model_name))
    return ""


_Base: Any = Scheduler if TYPE_CHECKING else object


class EstimatingMixin(_Base):
    """A scheduler that takes estimates and tells ends. Stands behind SnapshotMixin."""

    estimates: Estimates | None = None

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self.estimates is not None:
            self.estimates.gone(request)
        return super()._free_request(request, *args, **kwargs)
