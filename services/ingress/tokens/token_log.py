"""Token log: the hot path from tokens to deltas. A chunk is taken if it continues the log exactly.

Which chunks are taken, and what becomes of the others, is a table of the README ("Epochs and the token log").

One ChoiceDelta per chunk; no object, effect or log line per token.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from millrace.contracts.ingress import FinishReason, TokenChunk, TokenLogprobs

from services.ingress.calls.messages import ChoiceDelta, DeltaLogprob
from services.ingress.lifecycle import Finished, InstanceLost, LossCause, SequenceEvent, TokensMissing
from services.ingress.sequence import OpenSequence
from services.ingress.state import IngressState
from services.ingress.tokens.detokenizer import TextDelta, TokenizerVocabulary

_STOP = FinishReason.STOP
_LENGTH = FinishReason.LENGTH
#: What stands for an entry without any token: an unknown one, as improbable as OpenAI's API can say.
_NO_LOGPROB = [(-1, -9999.0)]


#: Events by which a sequence ends: its engine ended it, or a stop string or the token bound did, which its engine does
#: not know yet.
_ENDED, _STOPPED = Finished(engine_knows=True), Finished(engine_knows=False)
#: Finish reasons that are no end of the sequence.
_GIVEN_UP: dict[FinishReason | None, SequenceEvent] = {
    FinishReason.CANCELLED: InstanceLost("engine_gave_up"),
    FinishReason.ERROR: InstanceLost("engine_gave_up", LossCause.ENGINE_ERROR),
}


def take_chunk(
    state: IngressState, sequence: OpenSequence, chunk: TokenChunk
) -> tuple[SequenceEvent | None, ChoiceDelta | None]:
    """Append a chunk of the present epoch to its sequence's log.

    Returns:
        The event that it is of the sequence, and the delta for the client, if there are any.
    """
    log = sequence.log
    known = len(log)
    metrics = state.metrics
    token_ids = chunk.token_ids
    logprobs = chunk.logprobs
    finish = chunk.finish
    if chunk.first_index != known:
        overlap = known - chunk.first_index
        if overlap < 0:
            metrics.discarded.add("gap")
            return TokensMissing(), None
        if chunk.first_index < 0 or log[chunk.first_index :][: len(token_ids)] != token_ids[:overlap]:
            metrics.discarded.add("contradiction")
            return None, None
        token_ids = token_ids[overlap:]
        logprobs = None if logprobs is None else logprobs[overlap:]
        if chunk.pooled is not None:
            chunk = msgspec.structs.replace(chunk, pooled=chunk.pooled[overlap:])
        if not token_ids and finish is None:
            metrics.discarded.add("duplicate")
            return None, None
    if chunk.prompt_logprobs is not None and not known:
        sequence.output.prompt_logprobs = chunk.prompt_logprobs
    fresh = len(token_ids)
    if known + fresh >= sequence.tokens_max and finish is None:
        token_ids = token_ids[: sequence.tokens_max - known]
        finish, fresh = _LENGTH, len(token_ids)
    if fresh:
        sequence.output.pooled += chunk.pooled or ()
        _note_time(state, sequence, chunk)
        log += token_ids
        sequence.call.output_tokens += fresh
        metrics.output_tokens += fresh
        if sequence.evidence is not None:
            sequence.evidence.take(logprobs, fresh)
            sequence.call.listener.on_tokens(sequence.call)
    if chunk.times is not None:
        sequence.times = chunk.times
    if sequence.output.lazy and finish is None:
        if logprobs is not None:
            sequence.output.held_logprobs += _delta_logprobs(state, sequence, logprobs) or []
        return None, None
    return _detokenize(state, sequence, token_ids, logprobs, finish, chunk.finish)


def _detokenize(
    state: IngressState,
    sequence: OpenSequence,
    token_ids: list[int],
    logprobs: list[TokenLogprobs] | None,
    finish: FinishReason | None,
    engine_finish: FinishReason | None,
) -> tuple[SequenceEvent | None, ChoiceDelta]:
    """Turn taken tokens into text, and find whether the sequence ended."""
    output = sequence.output
    event: SequenceEvent | None
    final = finish is _STOP or finish is _LENGTH
    shown = None if logprobs is None else _delta_logprobs(state, sequence, logprobs[: len(token_ids)])
    if output.lazy:
        token_ids = sequence.log[output.pushed :]
    text = output.stream.push(token_ids, final, finish is _STOP)
    output.pushed = len(sequence.log)
    if text.stop_match is not None:
        surplus = len(token_ids) - text.tokens_used
        if surplus:
            del sequence.log[-surplus:]
            if sequence.evidence is not None:
                sequence.evidence.drop(surplus)
            sequence.call.output_tokens -= surplus
            shown = shown if shown is None else shown[: text.tokens_used]
        output.finish_reason, output.stop_reason = "stop", text.stop_match
        event = _STOPPED if engine_finish is None else _ENDED
    elif final:
        output.finish_reason = "stop" if finish is _STOP else "length"
        if finish is _STOP and sequence.log and sequence.log[-1] in sequence.sampling.stop_token_ids:
            output.stop_reason = sequence.log[-1]
        event = _STOPPED if engine_finish is None else _ENDED
    else:
        event = _GIVEN_UP.get(finish)
    return event, _delta(state, sequence, text, token_ids, shown)


def end_text(state: IngressState, sequence: OpenSequence, reason: str) -> ChoiceDelta:
    """The last delta of a sequence whose log is complete although its engine's last message was lost."""
    output = sequence.output
    stop_token = reason == "stop"
    token_ids = sequence.log[output.pushed :]
    text = output.stream.push(token_ids, True, stop_token)
    output.pushed = len(sequence.log)
    output.finish_reason = reason
    if text.stop_match is not None:
        output.finish_reason, output.stop_reason = "stop", text.stop_match
    elif stop_token and sequence.log[-1] in sequence.sampling.stop_token_ids:
        output.stop_reason = sequence.log[-1]
    return _delta(state, sequence, text, token_ids, None)


def _delta(
    state: IngressState,
    sequence: OpenSequence,
    text: TextDelta,
    token_ids: list[int],
    shown: list[DeltaLogprob] | None,
) -> ChoiceDelta:
    """The delta of a text and its tokens, with what was held for them."""
    output, used = sequence.output, text.tokens_used
    if output.held_logprobs:
        shown, output.held_logprobs = output.held_logprobs + (shown or []), []
    told = token_ids[:used] if sequence.call.call.tell_tokens else None
    delta = ChoiceDelta(sequence.index, text.text, used, output.finish_reason, output.stop_reason, shown, told)
    if output.pooled:
        return msgspec.structs.replace(delta, text="", pooled=b"".join(output.pooled))
    return delta if output.prompt_logprobs is None else _with_prompt(state, sequence, delta)


def _with_prompt(state: IngressState, sequence: OpenSequence, delta: ChoiceDelta) -> ChoiceDelta:
    """The delta with the log-probabilities of the prompt, which are told once."""
    entries, sequence.output.prompt_logprobs = sequence.output.prompt_logprobs or [], None
    name = _namer(state, sequence)
    told = [
        {
            str(token): {"logprob": max(logprob, -9999.0), "rank": rank, "decoded_token": name(token)}
            for token, logprob, rank in zip(
                entry.token_ids, entry.logprobs, (entry.rank, *range(1, len(entry.token_ids))), strict=True
            )
        }
        for entry in entries
    ]
    return msgspec.structs.replace(delta, prompt_logprobs=[None, *told])


def _namer(state: IngressState, sequence: OpenSequence) -> Callable[[int], str]:
    """The name of a token in log-probabilities."""
    call = sequence.call.call
    return "token_id:{}".format if call.tokens_as_ids else state.models[call.model].vocabulary.piece_text


def _note_time(state: IngressState, sequence: OpenSequence, chunk: TokenChunk) -> None:
    """Observe the latency of one chunk with tokens."""
    now_ns = state.now_ns
    if not sequence.fresh:
        gap_ns = now_ns - sequence.last_ns
        state.metrics.itl.observe(gap_ns)
        state.metrics.vllm.of(sequence.call.call.model).between.observe(gap_ns / 1e9)
    else:
        _note_first(state, sequence, chunk.cached_tokens)
    sequence.last_ns = now_ns
    if sequence.retry.fruitless or sequence.retry.suspect:
        sequence.retry.progressed()


def _note_first(state: IngressState, sequence: OpenSequence, cached_tokens: int | None) -> None:
    call = sequence.call
    sequence.fresh = False
    if sequence.log:
        gap = state.metrics.migration_gap if sequence.moved else state.metrics.gap
        gap.observe(state.now_ns - sequence.last_ns)
        return
    if not call.first_token_ns:
        call.first_token_ns = state.now_ns
        if call.listener.is_client:
            state.metrics.ttft.observe(state.now_ns - call.arrival_ns)
    if (
        cached_tokens and cached_tokens > 0 and sequence.index % call.call.n == 0
    ):  # prompts count once, so do their cached tokens
        call.cached_tokens += min(cached_tokens, len(sequence.prompt))


def _delta_logprobs(
    state: IngressState, sequence: OpenSequence, logprobs: list[TokenLogprobs]
) -> list[DeltaLogprob] | None:
    count = sequence.told_logprobs
    if count is None:
        return None
    vocabulary, name = state.models[sequence.call.call.model].vocabulary, _namer(state, sequence)
    return [_delta_logprob(vocabulary, name, entry, count) for entry in logprobs]


def _delta_logprob(
    vocabulary: TokenizerVocabulary, name: Callable[[int], str], entry: TokenLogprobs, count: int
) -> DeltaLogprob:
    pairs = list(zip(entry.token_ids, entry.logprobs, strict=False)) or _NO_LOGPROB
    chosen, logprob = pairs[0]
    top = [(name(i), p, vocabulary.piece(i)) for i, p in pairs[1 : 1 + count]]
    return DeltaLogprob(name(chosen), logprob, vocabulary.piece(chosen), top)
