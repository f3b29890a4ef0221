"""Hidden states of running requests inside a V1 model runner: which rows are read, what is made of them, and the proof
that they are the right ones.

    HeadReader      every k-th step some rows -> RowEstimates, which travels with the step's output
    ReadingMixin    V1 runners: takes the rows before the step is sampled

Rows are taken every ``every`` steps, at most ROWS_MAX at a time: a batch of more is parted into groups with a step of
their own each, so that no step pays for all. Rows of prompts that are not done are left out. Nothing that is sampled
depends on any of it.

The proof: ``argmax(lm_head . h)`` of the first PROVEN rows of greedy requests must be the token that is then sampled.
Logits are computed again from the copied rows, as the rows' order is what is to be proven. Where one differs nothing is
read any more, and what was recorded is dropped.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from millrace.kvcopy.weights import weights_fingerprint
from millrace.lengths.head import HeadUnreadable, RemainingHead, read_head
from vllm.logger import init_logger
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from services.worker.vllm_engine.continuation import EXPECTED_TOKENS

logger = init_logger(__name__)

#: Key in VllmConfig.additional_config: fields of StateSettings.
SETTINGS = "remaining"
#: Name of the attribute that RowEstimates travels by on vLLM's output of a step.
ROWS = "millrace_rows"
#: Rows of one call: more cost a CPU step more than it may notice, and fewer calls would each cost about as much.
ROWS_MAX = 16
#: Rows of greedy requests that prove what is read.
PROVEN = 24
#: Logits of recomputed rows may differ by their rounding: a sampled token this near the maximum is one.
TIE = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 1e-4}

_Base: Any = CPUModelRunner if TYPE_CHECKING else object


class StateSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings with which the engine process reads states (ARES, section 4.2).

    Attributes:
        head: File of the head; empty for none.
        every: Steps between two estimates of a request.
        record: File that states are kept in with what became of their requests, for training; bounded, and replaced at
            each start. Empty for none.
    """

    head: str = ""
    every: int = 8
    record: str = ""


def settings_of(vllm_config: Any) -> StateSettings:
    """Raises msgspec.ValidationError where they are wrong."""
    return msgspec.convert(vllm_config.additional_config.get(SETTINGS, {}), StateSettings)


class RowEstimates(msgspec.Struct, frozen=True, array_like=True):
    """Results of one step's rows; all lists have the same order.

    Attributes:
        generated: Output tokens at each state.
        rests: (p50, p90) of the rest, tokens; empty without a head. A NaN says that a state was no number.
        states: float16 little-endian, where states are recorded.
        wrong: A row was not that of its request: no more will come.
    """

    requests: list[str]
    generated: list[int]
    rests: list[list[float]] = []
    states: list[bytes] = []
    wrong: bool = False


class Rows(msgspec.Struct, frozen=True):
    """A step's rows before they are estimated.

    Attributes:
        states: (rows, width), on the runner's device.
        greedy: Until enough were seen: places of the rows that sample greedily.
        logits: And their logits, computed again from ``states``, (greedy, vocabulary).
    """

    requests: list[str]
    generated: np.ndarray
    left: np.ndarray
    submitted: np.ndarray
    states: torch.Tensor
    greedy: tuple[int, ...] = ()
    logits: torch.Tensor | None = None


class HeadReader:
    """Reader of an engine's states, with estimates from them.

    Attributes:
        compared: Rows that were compared with what was sampled.
        wrong: Whether one differed.
    """

    def __init__(self, head: RemainingHead | None, *, every: int, record: bool) -> None:
        self.head = head
        self.compared = 0
        self.wrong = False
        self._every = max(1, every)
        self._record = record
        self._step = 0

    def due(self, count: int) -> slice | None:
        """Rows of a batch of ``count`` whose turn this step is."""
        if self.wrong:
            return None
        step = self._step = (self._step + 1) % self._every
        groups = min(self._every, -(-count // ROWS_MAX))
        gap = self._every // groups if groups else 0
        if not gap or step % gap or step // gap >= groups:
            return None
        return slice(step // gap, count, groups)

    def estimate(self, rows: Rows) -> RowEstimates:
        """Estimates from states; copies them where they are recorded."""
        states = rows.states.float().cpu().numpy()
        rests: list[list[float]] = []
        if self.head is not None:
            rests = self.head.estimate(states, rows.generated, rows.left, rows.submitted).tolist()
        kept = [state.tobytes() for state in states.astype("<f2")] if self._record else []
        return RowEstimates(rows.requests, rows.generated.tolist(), rests, kept, self.wrong)

    def finish(self, rows: Rows, output: Any) -> Any:
        """Estimates rows and sends them with vLLM's output of their step; compares them with it where that is due."""
        if rows.logits is not None:
            names = [rows.requests[place] for place in rows.greedy]
            sampled = [output.sampled_token_ids[output.req_id_to_index[name]][-1] for name in names]
            self._compare(rows.logits.cpu(), sampled)
        setattr(output, ROWS, self.estimate(rows))
        return output

    def _compare(self, logits: torch.Tensor, sampled: list[int]) -> None:
        """Looks for rows whose sampled token is not the most likely one."""
        best = logits.max(dim=-1).values.float()
        taken = logits[torch.arange(len(sampled)), torch.tensor(sampled)].float()
        tie = TIE.get(logits.dtype, 1e-4)
        self.compared += len(sampled)
        if bool((taken < best - tie * best.abs().clamp(min=1.0)).any()):
            self.wrong = True
            logger.warning("states are not those of their requests: no remaining lengths are read from them")


class ReadingMixin(_Base):
    """A V1 model runner whose states are read before it samples."""

    millrace_reader: HeadReader | None = None

    def millrace_rows(self) -> Rows | None:
        """The rows whose turn it is; None for none. Call between the forward pass and the sampling."""
        reader, state = self.millrace_reader, self.execute_model_state
        if reader is None or state is None:
            return None
        batch = self.input_batch
        due = reader.due(batch.num_reqs)
        if due is None:
            return None
        unfinished = self.discard_request_mask.np[: batch.num_reqs][due]
        indices = np.arange(batch.num_reqs)[due]
        states = state.sample_hidden_states[due]
        if unfinished.any():
            indices = indices[~unfinished]
            states = state.sample_hidden_states[torch.from_numpy(indices).to(state.sample_hidden_states.device)]
        if not len(indices):
            return None
        generated = (batch.num_tokens_no_spec[indices] - batch.num_prompt_tokens[indices]).astype(np.int64)
        names = [batch.req_ids[index] for index in indices.tolist()]
        bounds = [_bounds(self.requests[name].sampling_params) for name in names]
        known = np.array(bounds, np.int64)
        room = self.max_model_len - batch.num_prompt_tokens[indices]
        rows = Rows(names, generated, np.minimum(known[:, 0], room) - generated, known[:, 1], states)
        return self._millrace_provable(rows) if reader.compared < PROVEN else rows

    def _millrace_provable(self, rows: Rows) -> Rows:
        """The rows with what their states say of the tokens that greedy requests are about to sample."""
        names = enumerate(rows.requests)
        greedy = tuple(place for place, name in names if _takes_likeliest(self.requests[name].sampling_params))
        if not greedy:
            return rows
        logits = self.model.compute_logits(rows.states[torch.tensor(greedy, device=rows.states.device)])
        return msgspec.structs.replace(rows, greedy=greedy, logits=logits)


def _takes_likeliest(sampling: Any) -> bool:
    """Whether a request samples the likeliest token, whatever came before."""
    penalties = (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty - 1.0)
    bounds = (sampling.structured_outputs, sampling.logit_bias, sampling.allowed_token_ids, sampling.bad_words)
    return sampling.temperature == 0.0 and not any((*penalties, *bounds, sampling.min_tokens))


def _bounds(sampling: Any) -> tuple[int, int]:
    arguments = sampling.extra_args
    return sampling.max_tokens, (arguments.get(EXPECTED_TOKENS) or 0) if arguments else 0


def unreadable(vllm_config: Any) -> str:
    """Reasons why states of an engine of this configuration are not read; empty where they can be."""
    found = {
        "it decodes speculatively": vllm_config.speculative_config is not None,
        "it serves LoRA adapters": vllm_config.lora_config is not None,
        "it has several ranks": vllm_config.parallel_config.world_size > 1,
        "it captures routed experts": bool(getattr(vllm_config, "aux_output_config", None))
        and vllm_config.aux_output_config.enabled,
    }
    return "; ".join(reason for reason, true in found.items() if true)


def reader_of(vllm_config: Any) -> HeadReader | None:
    """Reader of an engine, as ``additional_config`` says; None, and a line in the log, where states cannot be read."""
    settings, model = settings_of(vllm_config), vllm_config.model_config
    refusal, head = unreadable(vllm_config), None
    try:
        if settings.head and not refusal:
            head = read_head(Path(settings.head), fingerprint=weights_fingerprint(model.model) or model.model)
    except (HeadUnreadable, OSError) as error:
        refusal = str(error)
    if head is not None and head.info.hidden_size != (width := model.get_hidden_size()):
        refusal = f"{settings.head}: reads states of width {head.info.hidden_size}, the model's are {width} wide"
    if refusal:
        logger.warning("no remaining lengths from hidden states: %s", refusal)
        return None
    return HeadReader(head, every=settings.every, record=bool(settings.record))
