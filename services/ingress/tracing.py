"""Spans of a call: ``ingress`` at the root; ``tag``, ``forecast``, ``dispatch``, ``continuation`` below; if sampled.

A worker's queue, prefill and decode spans are children of the ``dispatch`` or ``continuation`` span that placed the
sequence, whose context travels in SubmitSequence's ``traceparent``.
"""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
from millrace.actor.effects import Effect, RecordSpan
from millrace.contracts.observers import Forecast
from millrace.telemetry.tracecontext import child, format_traceparent

from services.ingress.calls.messages import Usage
from services.ingress.dispatch.decision import DispatchDecision
from services.ingress.pending import PendingForecast, PendingTag
from services.ingress.state import EpochGrant, OpenCall, OpenSequence


def new_span(call: OpenCall, rng: Random) -> str:
    """Context of a new child of the call's root span; the call's own where nothing is sampled."""
    if call.trace is None:
        return call.call.traceparent
    return format_traceparent(child(call.trace, rng))


def end_tag(call: OpenCall, pending: PendingTag, result: str, now_ns: int, out: list[Effect]) -> None:
    """The question to the tagger ended."""
    if call.trace is None:
        return
    attributes: dict[str, Any] = {"request": call.request, "result": result}
    if call.predicted is not None:
        attributes["expected_output_tokens"] = call.predicted
    out.append(
        RecordSpan(
            name="tag",
            traceparent=pending.span,
            parent_span_id=call.trace.span_id,
            start_ns=pending.started_ns,
            end_ns=now_ns,
            attributes=attributes,
        )
    )


def end_forecast(
    call: OpenCall, pending: PendingForecast, forecasts: list[Forecast], now_ns: int, out: list[Effect]
) -> None:
    """The question to predictors ended."""
    if call.trace is None:
        return
    answered = [f for f in forecasts if not f.note]
    attributes: dict[str, Any] = {
        "request": call.request,
        "asked": len(pending.asked),
        "answered": len(answered),
        "answers": ", ".join(f"{f.name}: {f.note or _said(f)}" for f in forecasts),
    }
    if pending.sampled:
        attributes["rank_sample"] = True
    out.append(
        RecordSpan(
            name="forecast",
            traceparent=pending.span,
            parent_span_id=call.trace.span_id,
            start_ns=pending.started_ns,
            end_ns=now_ns,
            attributes=attributes,
            error="" if answered else "no prediction",
        )
    )


def _said(forecast: Forecast) -> str:
    cached = f", {forecast.cached_tokens} tokens cached" if forecast.cached_tokens else ""
    return f"{forecast.e2e_ns / 1e6:.1f} ms, first token {forecast.ttft_ns / 1e6:.1f} ms{cached}"


def begin_placement(
    sequence: OpenSequence, dispatch: DispatchDecision, now_ns: int, rng: Random
) -> dict[str, Any] | None:
    """Opens the sequence's dispatch or continuation span; its attributes so far, or None where nothing is sampled."""
    call = sequence.call
    decision = dispatch.decision
    earlier = sequence.span
    sequence.span = new_span(call, rng)
    sequence.span_start_ns = now_ns
    if call.trace is None:
        return None
    attributes: dict[str, Any] = {
        "request": call.request,
        "sequence": sequence.id,
        "epoch": sequence.epoch,
        "policy": dispatch.policy,
        "instance": decision.chosen or "",
        "reason": decision.reason,
        "scores": ", ".join(f"{s.name}={s.score:.3f}" for s in decision.scores[:4]),
        "output_tokens": len(sequence.log),
    }
    if dispatch.fallback:
        attributes["fallback"] = dispatch.fallback
    if dispatch.forecasts:
        attributes["forecasts"] = msgspec.json.encode(dispatch.forecasts).decode()  # `millrace explain` reads it
    if sequence.owned:
        attributes["cause"] = sequence.why
        attributes["link"] = earlier
    return attributes


def end_placement(
    sequence: OpenSequence, attributes: dict[str, Any] | None, error: str, now_ns: int, out: list[Effect]
) -> None:
    """The placement was accepted (no error) or came to nothing."""
    call = sequence.call
    if attributes is None or call.trace is None:
        return
    attributes = dict(attributes)
    earlier = attributes.pop("link", "")
    out.append(
        RecordSpan(
            name="continuation" if "cause" in attributes else "dispatch",
            traceparent=sequence.span,
            parent_span_id=call.trace.span_id,
            start_ns=sequence.span_start_ns,
            end_ns=now_ns,
            attributes=attributes,
            links=[earlier] if earlier else [],
            error=error,
        )
    )


def end_move(
    sequence: OpenSequence, allotment: EpochGrant, *, source: str, outcome: str, now_ns: int, out: list[Effect]
) -> None:
    """The target of a migration has the sequence: a span since its epoch was allotted, linked to the one before."""
    call = sequence.call
    earlier, sequence.span = sequence.span, allotment.span
    if call.trace is None:
        return
    out.append(
        RecordSpan(
            name="move",
            traceparent=allotment.span,
            parent_span_id=call.trace.span_id,
            start_ns=allotment.at_ns,
            end_ns=now_ns,
            attributes={
                "request": call.request,
                "sequence": sequence.id,
                "epoch": allotment.epoch,
                "migration": allotment.migration,
                "source": source,
                "instance": allotment.instance.name,
                "outcome": outcome,
                "output_tokens": len(sequence.log),
            },
            links=[earlier] if earlier else [],
        )
    )


def end_call(call: OpenCall, outcome: str, usage: Usage, error: str, now_ns: int, out: list[Effect]) -> None:
    """The root span."""
    if call.trace is None:
        return
    first = call.first_token_ns
    out.append(
        RecordSpan(
            name="ingress",
            traceparent=call.call.traceparent,
            parent_span_id=call.call.parent_span_id,
            start_ns=call.arrival_ns,
            end_ns=now_ns,
            attributes={
                "request": call.request,
                "model": call.call.model,
                "key": call.call.key,
                "outcome": outcome,
                "prompt_tokens": usage.prompt_tokens,
                "output_tokens": usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
                "continuations": call.continuations,
                "migrations": call.migrations,
                "instances": ", ".join(call.instances),
                "finish_reasons": ", ".join(s.finish_reason for s in call.sequences),
            },
            events=[("first_token", first, {})] if first else [],
            error=error,
        )
    )
