"""Hidden states of running requests inside a model runner: which rows are read, what is made of them, and the proof
that they are the right ones.

    HeadReader      every k-th step some rows -> RowEstimates, which travels with the step's output
    WatchingMixin   V1 runners: takes the rows before the step is sampled
    LateRows        a step's output that is still on its way from a GPU, and its rows with it
    WatchedRank     a worker's answers to the engine core: load, prove, state

Rows are taken every ``every`` steps, at most ROWS_MAX at a time: a batch of more is parted into groups with a step of
their own each, so that no step pays for all. Rows of prompts that are not done are left out. Nothing that is sampled
depends on any of it.

The proof: while ``proving``, each row's ``argmax(lm_head . h)`` must be the token that a greedy request then samples,
on whatever runner this is. Logits are computed again from the copied rows, as the rows' order is what is to be proven.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from millrace.lengths.head import HeadUnreadable, RemainingHead, read_head
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from services.worker.vllm_engine.continuation import EXPECTED_TOKENS

#: Key in VllmConfig.additional_config: a StateSettings as JSON; absent where no state is read.
STATES = "millrace_states"
#: Name of the attribute that RowEstimates travels by on vLLM's output of a step.
ROWS = "millrace_rows"
#: Rows of one call: more cost a CPU step more than it may notice, and fewer calls would each cost about as much.
ROWS_MAX = 16
#: Logits of recomputed rows may differ by their rounding: a sampled token this near the maximum is one.
TIE = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 1e-4}

_Base: Any = CPUModelRunner if TYPE_CHECKING else object


class StateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings with which the engine process reads states.

    Attributes:
        head: File of the head; empty for none.
        fingerprint: Of the weights in force, which the head must have been trained on.
        every: Steps between two estimates of a request.
        record: File that states are kept in for training; empty for none.
    """

    head: str = ""
    fingerprint: str = ""
    every: int = 8
    record: str = ""


class RowEstimates(msgspec.Struct, frozen=True, array_like=True):
    """Results of one step's rows; all lists have the same order.

    Attributes:
        generated: Output tokens at each state.
        rests: (p50, p90) of the rest, tokens; empty without a head. A NaN says that a state was no number.
        states: float16 little-endian, where states are recorded.
    """

    requests: list[str]
    generated: list[int]
    rests: list[list[float]] = []
    states: list[bytes] = []


def rows_of(output: Any) -> RowEstimates | None:
    """Estimates that came with a step's output; None where there are none."""
    rows: RowEstimates | None = getattr(output, ROWS, None)
    return rows


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the self-test: rows compared, and those that differed."""

    rows: int
    wrong: int


class Rows(msgspec.Struct, frozen=True):
    """A step's rows before they are estimated.

    Attributes:
        states: (rows, width), on the runner's device.
        greedy: While proving: places of the rows that sample greedily.
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
    """Reader of states on one rank, with estimates from them.

    Attributes:
        proving: Every row of every step is taken, and compared with what is sampled.
    """

    def __init__(self, head: RemainingHead | None, *, every: int, record: bool) -> None:
        self.head = head
        self.proving = False
        self._every = max(1, every)
        self._record = record
        self._step = 0
        self._compared = 0
        self._wrong = 0

    def due(self, count: int) -> slice | None:
        """Rows of a batch of ``count`` whose turn this step is."""
        if self.proving:
            return slice(0, count)
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
        return RowEstimates(rows.requests, rows.generated.tolist(), rests, kept)

    def finish(self, rows: Rows, output: Any) -> Any:
        """Estimates rows and sends them with vLLM's output of their step; while proving, compares them with it."""
        if rows.logits is not None:
            names = [rows.requests[place] for place in rows.greedy]
            sampled = [output.sampled_token_ids[output.req_id_to_index[name]][-1] for name in names]
            self._compare(rows.logits.cpu(), sampled)
        setattr(output, ROWS, self.estimate(rows))
        return output

    def _compare(self, logits: torch.Tensor, sampled: list[int]) -> None:
        """Counts rows whose sampled token is not the most likely one."""
        best = logits.max(dim=-1).values.float()
        taken = logits[torch.arange(len(sampled)), torch.tensor(sampled)].float()
        tie = TIE.get(logits.dtype, 1e-4)
        self._compared += len(sampled)
        self._wrong += int((taken < best - tie * best.abs().clamp(min=1.0)).sum())

    def proof(self) -> Proof:
        """Ends the self-test."""
        self.proving = False
        return Proof(rows=self._compared, wrong=self._wrong)


class WatchingMixin(_Base):
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
        return self._millrace_provable(rows) if reader.proving else rows

    def _millrace_provable(self, rows: Rows) -> Rows:
        """The rows with what their states say of the tokens that greedy requests are about to sample."""
        names = enumerate(rows.requests)
        greedy = tuple(place for place, name in names if self.requests[name].sampling_params.temperature == 0.0)
        if not greedy:
            return rows
        logits = self.model.compute_logits(rows.states[torch.tensor(greedy, device=rows.states.device)])
        return msgspec.structs.replace(rows, greedy=greedy, logits=logits)


class LateRows(AsyncModelRunnerOutput):
    """Output of a step on a GPU, whose rows are estimated on the host when the output is there.

    Its rows were copied on the stream that vLLM copies the output by, before vLLM recorded the event that it waits for.
    """

    def __init__(self, output: Any, rows: Rows, reader: HeadReader) -> None:
        self._output, self._rows, self._reader = output, rows, reader

    def get_output(self) -> Any:
        """Waits for the output, then estimates."""
        return self._reader.finish(self._rows, self._output.get_output())

    def get_kv_connector_output(self) -> Any:
        """Asked for by vLLM 0.33 where a step failed."""
        return self._output.get_kv_connector_output()


def on_host(rows: Rows, stream: Any) -> Rows:
    """The same rows in host memory, once the work on ``stream`` is done."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        states = rows.states.to("cpu", non_blocking=True)
        logits = rows.logits.to("cpu", non_blocking=True) if rows.logits is not None else None
    for tensor in (rows.states, rows.logits):
        if tensor is not None:
            tensor.record_stream(stream)
    return msgspec.structs.replace(rows, states=states, logits=logits)


def _bounds(sampling: Any) -> tuple[int, int]:
    arguments = sampling.extra_args
    return sampling.max_tokens, (arguments.get(EXPECTED_TOKENS) or 0) if arguments else 0


def unreadable(vllm_config: Any) -> str:
    """Reasons why states of an engine of this configuration are not read; empty where they can be."""
    parallel = vllm_config.parallel_config
    found = {
        "it decodes speculatively": vllm_config.speculative_config is not None,
        "it serves LoRA adapters": vllm_config.lora_config is not None,
        "its layers are spread over pipeline stages": parallel.pipeline_parallel_size > 1,
        "its contexts are spread over ranks": parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
        "it captures routed experts": bool(getattr(vllm_config, "aux_output_config", None))
        and vllm_config.aux_output_config.enabled,
    }
    return "; ".join(reason for reason, true in found.items() if true)


class WatchedRank(_Base):
    """A vLLM worker whose runner reads states."""

    def millrace_states_begin(self, settings: bytes) -> str:
        """Loads the head and begins the self-test; why this rank reads nothing, or nothing."""
        wanted = msgspec.json.decode(settings, type=StateSettings)
        try:
            head = read_head(Path(wanted.head), fingerprint=wanted.fingerprint) if wanted.head else None
        except (HeadUnreadable, OSError, ImportError) as error:
            return str(error)
        width = self.model_config.get_hidden_size()
        if head is not None and head.info.hidden_size != width:
            return f"{wanted.head}: reads states of width {head.info.hidden_size}, the model's are {width} wide"
        reader = HeadReader(head, every=wanted.every, record=bool(wanted.record))
        reader.proving = True
        return self._millrace_watch(reader)

    def _millrace_watch(self, reader: HeadReader) -> str:
        if not isinstance(self.model_runner, WatchingMixin):
            return f"states of a {type(self.model_runner).__name__} cannot be read"
        self.model_runner.millrace_reader = reader
        return ""

    def millrace_states_proof(self, ended: bool) -> bytes:
        """Ends the self-test; an encoded Proof. Where a row was wrong, or none was seen, nothing is read any more."""
        reader = self.model_runner.millrace_reader
        proof: Proof = reader.proof() if reader is not None else Proof(rows=0, wrong=0)
        if not ended or proof.wrong or not proof.rows or self.rank:
            self.model_runner.millrace_reader = None  # states are the same on every rank: the first one estimates
        return msgspec.json.encode(proof)
