"""Asks, bids and boundaries in `millrace tap`, one line each."""

from __future__ import annotations

import pytest
from millrace.cli.broker_summaries import BROKER_SUMMARIES
from millrace.contracts.broker import AskForMove, BidRefusal, BoundaryMoved, MoveBid, MoveReason
from millrace.contracts.message import Body

ASK = "0c9f7c12aa"

CONVERSATION: tuple[tuple[Body, str], ...] = (
    (
        AskForMove(
            ask=ASK,
            sequence="r.0",
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
            why="520 tokens, stage s0 ends at 512",
        ),
        "#0c9f7c w0 asks for a bid: boundary, 520 tokens, stage s0 ends at 512 "
        "(tokens=520 blocks=33 rest=40..90 plan=3)",
    ),
    (
        MoveBid(
            ask=ASK,
            sequence="r.0",
            source="w0",
            bidder="w1",
            plan_epoch=3,
            burden_ns=17_400_000,
            load_tokens=284,
            blocks_idle=52,
            valid_ms=500,
        ),
        "#0c9f7c w1 answers w0: bids, delays its own by 17.4ms (load=284 idle=52), holds 500ms",
    ),
    (
        MoveBid(ask=ASK, sequence="r.0", source="w0", bidder="w2", plan_epoch=3, refusal=BidRefusal.NO_ROOM),
        "#0c9f7c w2 answers w0: no bid, no_room",
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
