"""Sampling as the contract says it, in vLLM's words; and vLLM's log-probabilities in the contract's."""

from __future__ import annotations

from typing import Any

from millrace.actor.engine import EngineSequence
from millrace.contracts.ingress import FinishReason, TokenLogprobs
from millrace.contracts.kv import read_until_ns
from millrace.contracts.worker import StructuredOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine import FinishReason as VllmFinishReason
from vllm.v1.structured_output.utils import choice_as_grammar

from services.worker.vllm_engine.continuation import EXPECTED_TOKENS, OUTPUT_TOKENS
from services.worker.vllm_engine.kv_words import ARRIVAL, TimedHandover, encode

FINISH = {
    VllmFinishReason.STOP: FinishReason.STOP,
    VllmFinishReason.LENGTH: FinishReason.LENGTH,
    VllmFinishReason.ABORT: FinishReason.CANCELLED,
    VllmFinishReason.ERROR: FinishReason.ERROR,
    VllmFinishReason.REPETITION: FinishReason.STOP,
}
#: Fields that vLLM has under the same name.
_SAME = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs", "thinking_token_budget", "allowed_token_ids",
    "ignore_eos",
)  # fmt: skip


def sampling_params(
    sequence: EngineSequence, arrived_ns: int = 0, *, structured: StructuredOutputsParams | None = None
) -> SamplingParams:
    """VLLM's parameters of a sequence: tokens only, no text. ``arrived_ns`` is when it came, unix ns, for its handover.

    Raises:
        ValueError: vLLM refuses a value; its sentence says which.
    """
    sampling = sequence.sampling
    arguments: dict[str, Any] = {}
    if sequence.output_token_ids:
        arguments[OUTPUT_TOKENS] = len(sequence.output_token_ids)
    if sequence.expected_output_tokens is not None:
        arguments[EXPECTED_TOKENS] = sequence.expected_output_tokens
    if sequence.handover is not None:
        handover = sequence.handover
        until_ns = read_until_ns(arrived_ns, read_ms=handover.read_ms, until_ns=handover.until_ns)
        arguments[ARRIVAL] = encode(TimedHandover(handover=handover, until_ns=until_ns))
    params = SamplingParams(
        **{name: getattr(sampling, name) for name in _SAME},
        prompt_logprobs=None if sequence.output_token_ids else sampling.prompt_logprobs,
        stop_token_ids=list(sampling.stop_token_ids),
        structured_outputs=structured,
        extra_args=arguments or None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
    )
    if sampling.bad_words:
        params._bad_words_token_ids = sampling.bad_words
    return params


def structured_params(constraint: StructuredOutput) -> StructuredOutputsParams:
    """VLLM's parameters of a constraint.

    Raises:
        ValueError: it has not exactly one field.
    """
    return StructuredOutputsParams(
        json=constraint.json_schema,
        json_object=constraint.json_object or None,
        regex=constraint.regex,
        grammar=constraint.grammar if constraint.choice is None else choice_as_grammar(constraint.choice),
        structural_tag=constraint.structural_tag,
    )


def prompt_logprobs(tensors: Any) -> list[TokenLogprobs]:
    """One entry per token of the prompt from the second on."""
    columns = (each.tolist() for each in (tensors.logprob_token_ids, tensors.logprobs, tensors.selected_token_ranks))
    return [TokenLogprobs(*entry) for entry in zip(*columns, strict=True)]


def token_logprobs(lists: Any, alternatives: int) -> list[TokenLogprobs]:
    """One entry per position: the sampled token, then its ``alternatives`` most probable ones.

    vLLM's rows are as wide as the widest request of the batch; what this sequence did not ask for is cut off.
    """
    width = alternatives + 1
    return [
        TokenLogprobs(ids[:width].tolist(), values[:width].tolist(), int(rank))
        for ids, values, rank in zip(lists.logprob_token_ids, lists.logprobs, lists.sampled_token_ranks, strict=True)
    ]
