"""A trade as `millrace tap` tells it: what matters in each message from the ask to the end of the deal. Pure.

A deal is named by the first digits of its id, after ``~``. Sequences and subjects stand before these texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar, cast

from millrace.cli.field_text import bounded_list, duration
from millrace.contracts.broker import (
    AskForMove,
    BoundaryMoved,
    DealEnded,
    DealPostponed,
    DealQueued,
    DealRefused,
    DealStarted,
    EvacuationAnnounced,
    GrantDeal,
    LoadReported,
    LoadsReported,
    MoveBid,
    NoBid,
    OfferDeal,
    WithdrawDeal,
)
from millrace.contracts.message import Body

B = TypeVar("B", bound=Body)

#: Digits of a deal's id that are shown.
ID_DIGITS = 6

_MS = 1_000_000


def _name(deal: str) -> str:
    return f"~{deal[:ID_DIGITS]}"


def _load(body: LoadReported) -> str:
    used = body.blocks_total - body.blocks_free
    coming = f" queued={body.queued_tokens}" if body.queued_tokens else ""
    peak = f" peak={max(body.curve.blocks)}" if body.curve is not None and body.curve.blocks else ""
    return (
        f"{body.instance} stage={body.stage or '-'} tokens={body.tokens} waiting={body.waiting_tokens} "
        f"running={body.running} blocks={used}/{body.blocks_total}{peak}{coming}"
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
    gain = f" gain={duration(body.gain_ns)}" if body.gain_ns else ""
    return (
        f"{_name(body.deal)} {body.source} asks: {body.reason}, length={body.prompt_tokens + body.output_tokens} "
        f"blocks={body.blocks} rest={rest}{gain} plan={body.plan_epoch}"
    )


def _bid(body: MoveBid) -> str:
    return (
        f"{_name(body.deal)} {body.bidder} → {body.source}: yes, delays its own by {duration(body.burden_ns)} "
        f"load={body.load_tokens} idle={body.blocks_idle} start={duration(body.start_ms * _MS)} "
        f"valid={duration(body.valid_ms * _MS)}"
    )


def _no_bid(body: NoBid) -> str:
    return f"{_name(body.deal)} {body.bidder} → {body.source}: no, {body.reason} {body.detail}".rstrip()


def _offer(body: OfferDeal) -> str:
    scores = bounded_list([f"{s.name}:{s.note or format(s.score, '.4g')}" for s in body.scores])
    way = f"{body.source} → {body.target}"
    return f"{_name(body.deal)} {way}: {body.reason}, {body.why} {scores}"


def _queued(body: DealQueued) -> str:
    if body.granted:
        return f"{_name(body.deal)} granted, start within {duration(body.start_within_ms * _MS)}"
    return f"{_name(body.deal)} queued at {body.position}"


def _grant(body: GrantDeal) -> str:
    starving = ", slot kept: starving" if body.starving else ""
    way = f"{body.source} → {body.target}"
    return f"{_name(body.deal)} {way}: start within {duration(body.start_within_ms * _MS)}{starving}"


def _started(body: DealStarted) -> str:
    return f"{_name(body.deal)} starts"


def _postponed(body: DealPostponed) -> str:
    return f"{_name(body.deal)} not now, {body.outgoing} leave already"


def _refused(body: DealRefused) -> str:
    return f"{_name(body.deal)} no, {body.reason} {body.detail}".rstrip()


def _withdrawn(body: WithdrawDeal) -> str:
    return f"{_name(body.deal)} {body.source} → {body.target}: withdrawn, {body.detail}"


def _ended(body: DealEnded) -> str:
    why = f" {body.refusal}" if body.refusal is not None else ""
    took = f" in {duration(body.duration_ns)}" if body.duration_ns else ""
    return f"{_name(body.deal)} {body.source} → {body.target}: {body.outcome}{why}{took} {body.detail}".rstrip()


def _boundary(body: BoundaryMoved) -> str:
    return (
        f"{body.stage} | {body.next_stage} at {body.length} tokens, version {body.version} of plan {body.plan_epoch}, "
        f"kept by {body.keeper}: {body.why}"
    )


def _evacuation(body: EvacuationAnnounced) -> str:
    return f"everything leaves within {body.left_ms} ms" if body.left_ms else "the evacuation is over"


def _entry(kind: type[B], function: Callable[[B], str]) -> tuple[type[Body], Callable[[Body], str]]:
    return kind, cast("Callable[[Body], str]", function)


BROKER_SUMMARIES: Mapping[type[Body], Callable[[Body], str]] = dict(
    [
        _entry(LoadReported, _load),
        _entry(LoadsReported, _loads),
        _entry(AskForMove, _ask),
        _entry(MoveBid, _bid),
        _entry(NoBid, _no_bid),
        _entry(OfferDeal, _offer),
        _entry(DealQueued, _queued),
        _entry(GrantDeal, _grant),
        _entry(DealStarted, _started),
        _entry(DealPostponed, _postponed),
        _entry(DealRefused, _refused),
        _entry(WithdrawDeal, _withdrawn),
        _entry(DealEnded, _ended),
        _entry(EvacuationAnnounced, _evacuation),
        _entry(BoundaryMoved, _boundary),
    ]
)
