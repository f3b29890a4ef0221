"""Tokens to deltas: the hot path. A chunk is taken if it continues the log exactly; nothing is ever guessed.

    epoch or instance not the present ones     dropped, counted ``late``
    first_index == length of the log           taken
    first_index <  length, overlap equal       the rest is taken; without a rest counted ``duplicate``
    first_index <  length, overlap different   dropped, counted ``contradiction``
    first_index >  length                      dropped, counted ``gap``; the caller asks for a resend

One ChoiceDelta per chunk, one DeliverDeltas per call and bus message; no object, effect or log line per token.
"""

from __future__ import annotations

from enum import Enum

from millrace.actor.effects import Effect
from millrace.contracts.ingress import FinishReason, TokenChunk, TokenLogprobs

from services.ingress.calls.messages import ChoiceDelta, DeliverDeltas, DeltaLogprob, Usage
from services.ingress.state import IngressState, OpenCall, OpenSequence
from services.ingress.tokens.detokenizer import Vocabulary

_STOP = FinishReason.STOP
_LENGTH = FinishReason.LENGTH
#: What stands for an entry without any token: an unknown one, as improbable as OpenAI's API can say.
_NO_LOGPROB = [(-1, -9999.0)]


class Taken(Enum):
    """What became of a chunk."""

    GOES_ON = "goes_on"  # taken; the sequence goes on
    ENDED = "ended"  # taken; its engine ended the sequence
    STOPPED = "stopped"  # taken; a stop string or the token bound ended it, its engine does not know yet
    LOST = "lost"  # taken; the engine gave the sequence up
    GAP = "gap"  # not taken: tokens before it are missing
    IGNORED = "ignored"  # not taken: nothing new, or it contradicts the log


def take_chunk(state: IngressState, sequence: OpenSequence, chunk: TokenChunk) -> tuple[Taken, ChoiceDelta | None]:
    """Appends a chunk of the present epoch to its sequence's log; the delta for the client, if there is one."""
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
            return Taken.GAP, None
        if chunk.first_index < 0 or log[chunk.first_index :][: len(token_ids)] != token_ids[:overlap]:
            metrics.discarded.add("contradiction")
            return Taken.IGNORED, None
        token_ids = token_ids[overlap:]
        logprobs = None if logprobs is None else logprobs[overlap:]
        if not token_ids and finish is None:
            metrics.discarded.add("duplicate")
            return Taken.IGNORED, None
    fresh = len(token_ids)
    if known + fresh >= sequence.tokens_max and finish is None:
        token_ids = token_ids[: sequence.tokens_max - known]
        finish, fresh = _LENGTH, len(token_ids)
    if fresh:
        _note_time(state, sequence, chunk)
        log += token_ids
        sequence.call.output_tokens += fresh
        metrics.output_tokens += fresh
    if sequence.lazy and finish is None:
        if logprobs is not None:
            sequence.held_logprobs += _told_logprobs(state, sequence, logprobs) or []
        return Taken.GOES_ON, None
    return _speak(state, sequence, token_ids, logprobs, finish, chunk.finish)


def _speak(
    state: IngressState,
    sequence: OpenSequence,
    token_ids: list[int],
    logprobs: list[TokenLogprobs] | None,
    finish: FinishReason | None,
    engine_finish: FinishReason | None,
) -> tuple[Taken, ChoiceDelta | None]:
    """Turns taken tokens into text and sees whether the sequence ended."""
    final = finish is _STOP or finish is _LENGTH
    fresh = len(token_ids)
    if sequence.lazy:
        token_ids = sequence.log[sequence.pushed :]
    text = sequence.text.push(token_ids, final, finish is _STOP)
    sequence.pushed = len(sequence.log)
    told: list[DeltaLogprob] | None = None if logprobs is None else _told_logprobs(state, sequence, logprobs[:fresh])
    if text.stop_match is not None:
        surplus = len(token_ids) - text.tokens_used
        if surplus:
            del sequence.log[-surplus:]
            sequence.call.output_tokens -= surplus
            fresh -= surplus
            told = told if told is None else told[:fresh]
        sequence.finish_reason, sequence.stop_reason = "stop", text.stop_match
        taken = Taken.ENDED if engine_finish is not None else Taken.STOPPED
    elif final:
        sequence.finish_reason = "stop" if finish is _STOP else "length"
        if finish is _STOP and sequence.log and sequence.log[-1] in sequence.sampling.stop_token_ids:
            sequence.stop_reason = sequence.log[-1]
        taken = Taken.ENDED if engine_finish is not None else Taken.STOPPED
    else:
        taken = Taken.GOES_ON if finish is None else Taken.LOST
    if sequence.call.call.stream:
        return taken, ChoiceDelta(sequence.index, text.text, fresh, sequence.finish_reason, sequence.stop_reason, told)
    return taken, _hold(sequence, text.text, told)


def speak_end(sequence: OpenSequence, reason: str) -> ChoiceDelta | None:
    """The last delta of a sequence whose log is whole although its engine's word for the end was lost."""
    stop_token = reason == "stop"
    text = sequence.text.push(sequence.log[sequence.pushed :], True, stop_token)
    sequence.pushed = len(sequence.log)
    sequence.finish_reason = reason
    if text.stop_match is not None:
        sequence.finish_reason, sequence.stop_reason = "stop", text.stop_match
    elif stop_token and sequence.log[-1] in sequence.sampling.stop_token_ids:
        sequence.stop_reason = sequence.log[-1]
    if sequence.call.call.stream:
        return ChoiceDelta(sequence.index, text.text, 0, sequence.finish_reason, sequence.stop_reason, None)
    return _hold(sequence, text.text, None)


def _hold(sequence: OpenSequence, text: str, told: list[DeltaLogprob] | None) -> ChoiceDelta | None:
    """Keeps a delta of a call that does not stream; the whole choice once it has ended."""
    sequence.held_text.append(text)
    if told is not None:
        sequence.held_logprobs += told
    if not sequence.finish_reason:
        return None
    logprobs = sequence.held_logprobs if sequence.sampling.logprobs is not None else None
    return ChoiceDelta(
        sequence.index,
        "".join(sequence.held_text),
        len(sequence.log),
        sequence.finish_reason,
        sequence.stop_reason,
        logprobs,
    )


def _note_time(state: IngressState, sequence: OpenSequence, chunk: TokenChunk) -> None:
    """Latency metrics of one chunk with tokens."""
    now_ns = state.now_ns
    if not sequence.fresh:
        state.metrics.itl.observe(now_ns - sequence.last_ns)
    else:
        _note_first(state, sequence, chunk.cached_tokens)
    sequence.last_ns = now_ns
    sequence.fruitless = 0


def _note_first(state: IngressState, sequence: OpenSequence, cached_tokens: int | None) -> None:
    call = sequence.call
    sequence.fresh = False
    if sequence.log:
        gap = state.metrics.migration_gap if sequence.moved else state.metrics.gap
        gap.observe(state.now_ns - sequence.last_ns)
        return
    if not call.first_token_ns:
        call.first_token_ns = state.now_ns
        state.metrics.ttft.observe(state.now_ns - call.arrival_ns)
    if (
        cached_tokens and cached_tokens > 0 and sequence.index % call.call.n == 0
    ):  # prompts count once, so do their cached tokens
        call.cached_tokens += min(cached_tokens, len(sequence.prompt))


def deliver(call: OpenCall, deltas: list[ChoiceDelta], out: list[Effect]) -> None:
    """Hands deltas to the adapter, or keeps them until the call is accepted (as few as its choices' chunks)."""
    if call.accepted:
        usage = Usage(call.prompt_tokens, call.output_tokens, call.cached_tokens)
        out.append(DeliverDeltas(request=call.request, deltas=deltas, usage=usage))
    else:
        call.held += deltas


def deliver_held(call: OpenCall, out: list[Effect]) -> None:
    """The call was accepted: what came before goes out."""
    if call.held:
        held, call.held = call.held, []
        deliver(call, held, out)


def _told_logprobs(
    state: IngressState, sequence: OpenSequence, logprobs: list[TokenLogprobs]
) -> list[DeltaLogprob] | None:
    count = sequence.sampling.logprobs
    if count is None:
        return None
    vocabulary = state.models[sequence.call.call.model].vocabulary
    return [_told(vocabulary, entry, count) for entry in logprobs]


def _told(vocabulary: Vocabulary, entry: TokenLogprobs, count: int) -> DeltaLogprob:
    pairs = list(zip(entry.token_ids, entry.logprobs, strict=False)) or _NO_LOGPROB
    chosen, logprob = pairs[0]
    top = [(vocabulary.piece_text(i), p, vocabulary.piece(i)) for i, p in pairs[1 : 1 + count]]
    return DeltaLogprob(vocabulary.piece_text(chosen), logprob, vocabulary.piece(chosen), top)
