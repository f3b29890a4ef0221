"""A trade in `millrace tap`: from the ask to the end of the deal, one line each."""

from __future__ import annotations

import pytest
from millrace.cli.broker_summaries import BROKER_SUMMARIES
from millrace.contracts.broker import (
    AskForMove,
    BoundaryMoved,
    DealEnded,
    DealPostponed,
    DealQueued,
    DealRefusal,
    DealRefused,
    DealStarted,
    GrantDeal,
    MoveBid,
    MoveReason,
    NoBid,
    OfferDeal,
    WithdrawDeal,
)
from millrace.contracts.kv import KvRefusal
from millrace.contracts.message import Body
from millrace.contracts.migration import MigrationOutcome
from millrace.contracts.observers import CandidateScore

D = "0c9f7c12aa"
THERE = {"deal": D, "sequence": "r.0", "epoch": -1, "source": "w0", "target": "w1"}

CONVERSATION: tuple[tuple[Body, str], ...] = (
    (
        AskForMove(
            deal=D,
            sequence="r.0",
            epoch=-1,
            model="m",
            source="w0",
            reason=MoveReason.BOUNDARY,
            plan_epoch=3,
            prompt_tokens=500,
            output_tokens=20,
            blocks=33,
            max_tokens=900,
            rest_p50=40,
            rest_p90=90,
        ),
        "~0c9f7c w0 asks: boundary, length=520 blocks=33 rest=40..90 plan=3",
    ),
    (
        MoveBid(
            deal=D,
            sequence="r.0",
            epoch=-1,
            source="w0",
            bidder="w1",
            plan_epoch=3,
            burden_ns=17_400_000,
            load_tokens=284,
            blocks_idle=52,
        ),
        "~0c9f7c w1 → w0: yes, delays its own by 17.4ms load=284 idle=52 start=0 valid=1s",
    ),
    (
        NoBid(deal=D, sequence="r.0", source="w0", bidder="w2", reason=DealRefusal.NO_ROOM),
        "~0c9f7c w2 → w0: no, no_room",
    ),
    (
        OfferDeal(
            **THERE,
            reason=MoveReason.BOUNDARY,
            plan_epoch=3,
            tokens=520,
            blocks=33,
            why="least delay of 1: 1.64 s",
            scores=[CandidateScore(name="w1", score=1.643)],
        ),
        "~0c9f7c w0 → w1: boundary, least delay of 1: 1.64 s [w1:1.643]",
    ),
    (DealQueued(deal=D, sequence="r.0", epoch=-1, granted=False, position=2), "~0c9f7c queued at 2"),
    (
        DealQueued(deal=D, sequence="r.0", epoch=-1, granted=True, start_within_ms=500),
        "~0c9f7c granted, start within 500ms",
    ),
    (GrantDeal(**THERE, start_within_ms=500), "~0c9f7c w0 → w1: start within 500ms"),
    (
        GrantDeal(**THERE, start_within_ms=2_000, starving=True),
        "~0c9f7c w0 → w1: start within 2s, slot kept: starving",
    ),
    (DealPostponed(deal=D, sequence="r.0", epoch=-1, outgoing=3), "~0c9f7c not now, 3 leave already"),
    (DealRefused(deal=D, sequence="r.0", reason=DealRefusal.UNKNOWN), "~0c9f7c no, unknown"),
    (DealStarted(**THERE), "~0c9f7c starts"),
    (WithdrawDeal(**THERE, detail="new_plan"), "~0c9f7c w0 → w1: withdrawn, new_plan"),
    (DealEnded(**THERE, outcome=MigrationOutcome.MOVED, duration_ns=50_200_000), "~0c9f7c w0 → w1: moved in 50.2ms"),
    (
        DealEnded(**THERE, outcome=MigrationOutcome.REFUSED, refusal=KvRefusal.NO_BLOCKS),
        "~0c9f7c w0 → w1: refused no_blocks",
    ),
    (
        BoundaryMoved(
            model="m",
            stage="s0",
            next_stage="s1",
            length=220,
            plan_epoch=3,
            version=1,
            keeper="w0",
            at_ns=1,
            why="weighted: best at 402 of 6 sequences",
        ),
        "s0 | s1 at 220 tokens, version 1 of plan 3, kept by w0: weighted: best at 402 of 6 sequences",
    ),
)


@pytest.mark.parametrize(("body", "text"), CONVERSATION, ids=[type(body).__name__ for body, _ in CONVERSATION])
def test_a_trade_reads_as_a_conversation(body: Body, text: str) -> None:
    assert BROKER_SUMMARIES[type(body)](body) == text
