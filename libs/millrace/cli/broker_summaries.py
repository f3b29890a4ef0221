"""Asks, bids, loads and boundaries as `millrace tap` prints them. Pure.

An ask is named by the first digits of its id, after ``#``. Sequences and subjects stand before these texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar, cast

from millrace.cli.field_text import duration
from millrace.contracts.broker import AskForMove, BoundaryMoved, LoadReported, LoadsReported, MoveBid
from millrace.contracts.message import Body

B = TypeVar("B", bound=Body)

#: Digits of an ask's id that are shown.
ID_DIGITS = 6

_MS = 1_000_000


def ask_name(ask: str) -> str:
    """An ask as people see it."""
    return f"#{ask[:ID_DIGITS]}"


def _load(body: LoadReported) -> str:
    used = body.blocks_total - body.blocks_free
    coming = f" queued={body.queued_tokens}" if body.queued_tokens else ""
    peak = f" peak={max(body.curve.blocks)}" if body.curve is not None and body.curve.blocks else ""
    return (
        f"{body.instance} stage={body.stage or '-'} tokens={body.tokens} waiting={body.waiting_tokens} "
        f"running={body.running} blocks={used}/{body.blocks_total}{peak}{coming} | {body.why}".removesuffix(" | ")
    )


def _loads(body: LoadsReported) -> str:
    if not body.loads:
        return "no loads"
    stages = ", ".join(sorted({load.stage or "-" for load in body.loads}))
    tokens, waiting = (sum(getattr(load, name) for load in body.loads) for name in ("tokens", "waiting_tokens"))
    running = sum(load.running for load in body.loads)
    return f"{len(body.loads)} instances stage={stages} tokens={tokens} waiting={waiting} running={running}"


def _ask(body: AskForMove) -> str:
    rest = "?" if body.rest_p50 is None else f"{body.rest_p50}" + (f"..{body.rest_p90}" if body.rest_p90 else "")
    length = body.prompt_tokens + body.output_tokens
    return (
        f"{ask_name(body.ask)} {body.source} asks for a bid: {body.reason}, {body.why} "
        f"(tokens={length} blocks={body.blocks} rest={rest} plan={body.plan_epoch})"
    )


def _bid(body: MoveBid) -> str:
    way = f"{ask_name(body.ask)} {body.bidder} answers {body.source}"
    if body.refusal is not None:
        return f"{way}: no bid, {body.refusal}"
    return (
        f"{way}: bids, delays its own by {duration(body.burden_ns)} (load={body.load_tokens} idle={body.blocks_idle}), "
        f"holds {duration(body.valid_ms * _MS)}"
    )


def _boundary(body: BoundaryMoved) -> str:
    return (
        f"{body.stage} | {body.next_stage} at {body.length} tokens, version {body.version} of plan {body.plan_epoch}, "
        f"kept by {body.keeper}: {body.why}"
    )


def _entry(kind: type[B], function: Callable[[B], str]) -> tuple[type[Body], Callable[[Body], str]]:
    return kind, cast("Callable[[Body], str]", function)


BROKER_SUMMARIES: Mapping[type[Body], Callable[[Body], str]] = dict(
    [
        _entry(LoadReported, _load),
        _entry(LoadsReported, _loads),
        _entry(AskForMove, _ask),
        _entry(MoveBid, _bid),
        _entry(BoundaryMoved, _boundary),
    ]
)
