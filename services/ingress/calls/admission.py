"""Admission of calls: what is refused before anything is kept of it, and the state of an admitted call."""

from __future__ import annotations

import math

import msgspec
from millrace.contracts.tagger import LengthTag
from millrace.contracts.worker import Sampling

from services.ingress.calls.limits import RETRY_WHEN_FULL_S, Refusal
from services.ingress.calls.listener import Listener
from services.ingress.calls.messages import Call, ChoiceDelta, RefusalKind
from services.ingress.calls.open_call import OpenCall
from services.ingress.sequence import OpenSequence
from services.ingress.state import IngressState
from services.ingress.tokens.detokenizer import TextStream


def refusal_of(state: IngressState, call: Call) -> Refusal | None:
    """Reason for refusing a call; None after it was admitted and counted."""
    if state.stopping and state.stop_at_ns:  # one that is replaced serves who is still connected to it
        return Refusal(RefusalKind.STOPPING, "This server is going down.")
    if why := state.cut_off(state.now_ns, state.times.wait):
        return Refusal(RefusalKind.NO_INSTANCE, why, retry_after_s=RETRY_WHEN_FULL_S)
    model = call.model
    if call.members:
        refusal = _refusal_of_cascade(state, call)
    elif model not in state.models:
        return Refusal(RefusalKind.UNKNOWN_MODEL, f"The model {model} does not exist.", "model")
    else:
        refusal = too_long(state, call)
    lengths = list(map(len, call.prompts))
    if refusal is not None:
        return refusal
    return state.admission.admit(call, len(lengths) * call.n, sum(lengths), state.now_ns)


def _refusal_of_cascade(state: IngressState, call: Call) -> Refusal | None:
    """Reason for refusing a call of a cascade, besides what admission asks of every call."""
    served = state.cascades.get(call.model)
    if served is None or not call.members:
        return Refusal(RefusalKind.UNKNOWN_MODEL, f"The model {call.model} does not exist.", "model")
    highest = len(served.plan.tiers) - 1
    given = call.cascade.entry_tier
    if given is not None and given > highest:
        detail = f"The last tier of {call.model} is {highest}; tier {given} was asked for."
        return Refusal(RefusalKind.INVALID, detail, "cascade.entry_tier")
    return None


def too_long(state: IngressState, call: Call) -> Refusal | None:
    """Refusal of a call that no registered instance of its model can hold; None where one can, or none is known."""
    limit = state.cluster.length_max(call.model)
    prompt_tokens = max(map(len, call.prompts))
    if limit is None or prompt_tokens + call.sampling.room <= limit:
        return None
    detail = (
        f"The model's limit is {limit} tokens; the prompt has {prompt_tokens} and up to {call.sampling.max_tokens} "
        f"more were asked for."
    )
    return Refusal(RefusalKind.TOO_LONG, detail, "prompt" if prompt_tokens >= limit else "max_tokens")


def open_call(state: IngressState, call: Call, listener: Listener | None = None) -> OpenCall:
    """Open an admitted call with its sequences."""
    opened = OpenCall(call, state.now_ns, call.timeout_ns or state.times.call_timeout, listener or state.client)
    if call.sampling.pooling is not None:
        opened.expected_output_tokens, opened.predicted = 1, 1.0
    elif call.sampling.ignore_eos or call.sampling.min_tokens >= call.sampling.max_tokens:
        opened.expected_output_tokens = call.sampling.max_tokens
        opened.predicted = float(call.sampling.max_tokens)
    vocabulary = state.models[call.model].vocabulary
    samplings = [_of_choice(call.sampling, choice) for choice in range(call.n)]
    for index in range(len(call.prompts) * call.n):
        text = TextStream(vocabulary, call.stop, call.include_stop, call.skip_special_tokens, call.sampling.min_tokens)
        sampling = samplings[index % call.n]
        if call.second_from and sampling.pooling is not None:
            pair = msgspec.structs.replace(sampling.pooling, second_from=call.second_from[index])
            sampling = msgspec.structs.replace(sampling, pooling=pair)
        sequence = OpenSequence(opened, index, sampling, text, state.now_ns)
        opened.sequences.append(sequence)
        state.sequences[sequence.id] = sequence
    if call.begun:
        _begin_with(opened, call.begun)
    state.calls[call.request] = opened
    state.deadline_ns = min(state.deadline_ns, opened.deadline_ns)
    return opened


def _begin_with(opened: OpenCall, tokens: list[int]) -> None:
    """Take the tokens that another ingress had as the log of the one sequence."""
    sequence = opened.sequences[0]
    sequence.log += tokens
    text = sequence.output.stream.push(tokens, False, False)
    sequence.output.pushed = opened.output_tokens = len(tokens)
    opened.held.append(ChoiceDelta(0, text.text, len(tokens), token_ids=list(tokens)))


def _of_choice(sampling: Sampling, choice: int) -> Sampling:
    if sampling.seed is None or choice == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=sampling.seed + choice)


def expected_output(call: OpenCall, tag: LengthTag) -> tuple[float | None, int | None]:
    """The tag's mean, and the whole tokens within the call's bounds that engines are told. None where unknown."""
    mean = tag.mean
    if tag.request != call.request or mean is None or not math.isfinite(mean) or mean < 0:
        return None, None
    return mean, max(1, min(round(mean), call.call.sampling.max_tokens))
