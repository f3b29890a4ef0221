"""Display of a message by tap: one bounded line, whatever the bytes are."""

import re

import msgpack
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from millrace.cli.message_lines import DecodedMessage, message_line, message_object, read_message
from millrace.cli.migrate import REFUSALS, is_of, told
from millrace.cli.migrate import line as migration_line
from millrace.cli.tap import full_subject
from millrace.contracts.broker import BidRefusal, MoveBid, MoveReason
from millrace.contracts.codec import encode
from millrace.contracts.ingress import FinishReason, TokenChunk, TokensGenerated
from millrace.contracts.kv import CopierKind, KvEndpoint, KvRefusal
from millrace.contracts.leases import EndLease, KvRefused, LeaseKv, PullKv
from millrace.contracts.message import Body
from millrace.contracts.migration import MigrateSequence, MigrationCost, MigrationFinished, MigrationOutcome
from millrace.contracts.observers import CandidateScore
from millrace.contracts.worker import AcknowledgeSequences, Sampling, SubmitSequence

from tests.testbed.messages import decision, plain

AT_NS = 1_795_245_192_986_000_000
HEADERS = {"Mr-Type": "SubmitSequence/2", "Mr-Sender": "ingress-0", "Mr-Request": "r1", "traceparent": "00-a-b-01"}

TOKENS = {"prompt_token_ids": list(range(5_000)), "output_token_ids": [1, 2]}
SUBMIT = plain(SubmitSequence, sequence="r1.0", epoch=2, sampling=Sampling(max_tokens=64), **TOKENS)


def reading(payload: bytes, headers: dict[str, str] | None = None) -> DecodedMessage:
    return read_message(
        at_ns=AT_NS,
        subject="mr.local.engine.w0.submit",
        payload=payload,
        headers=headers,
        reply_to="_INBOX.x",
        prefix="mr.local",
    )


def line(body: Body | bytes, *, width: int = 500, headers: dict[str, str] | None = None, **options: bool) -> str:
    payload = body if isinstance(body, bytes) else encode(body)
    return message_line(reading(payload, headers), width=width, **options)


def test_a_line_names_subject_sender_type_request_and_what_matters() -> None:
    shown = line(SUBMIT, headers=HEADERS)
    assert "engine.w0.submit  ingress-0 → SubmitSequence/2 r1.0 epoch=2 prompt=5000 output_so_far=2 max=64" in shown
    assert "mr.local" not in shown
    assert line(SUBMIT, headers=HEADERS, headers_only=True).endswith("ingress-0 → SubmitSequence/2 r1.0")
    assert "? → SubmitSequence/2 r1.0 " in line(SUBMIT)


def test_long_arrays_are_bounded_and_counted() -> None:
    acknowledge = AcknowledgeSequences(sequences=[(f"r{index}.0", 0) for index in range(40)])
    assert "[[r0.0 0] [r1.0 0] [r2.0 0] [r3.0 0] +36]" in line(acknowledge)
    tokens = TokensGenerated(
        instance="w0",
        incarnation=1,
        step=9,
        chunks=[TokenChunk("a.0", 1, 5, [1, 2]), TokenChunk("b.0", 0, 0, [7], FinishReason.STOP)],
    )
    assert "step=9 tokens=3 [a.0e1@5+2 b.0@0+1!stop]" in line(tokens)


def test_a_decision_shows_who_was_chosen_by_what_with_which_scores() -> None:
    scores = [CandidateScore("w0", 12.0), CandidateScore("w1", 0.0, "draining")]
    made = decision("r1", policy="least_tokens", reason="fewest tokens", scores=scores)
    assert "dispatch to w0 by least_tokens [w0:12 w1:draining] fewest tokens" in line(made)
    assert " engine.w0.submit r1 dispatch to w0 by least_tokens [w0:12 w1" in line(made, width=80, headers=HEADERS)


def test_an_unknown_version_is_read_without_types_and_wrong_fields_are_malformed() -> None:
    payload = msgpack.packb({"type": "SubmitSequence/9", "sequence": "r7.0", "novelty": [1, 2, 3, 4, 5, 6]})
    assert "SubmitSequence/9 r7.0 unknown: no such type or version here novelty=[1 2 3 4 +2]" in line(payload)
    wrong = msgpack.packb({"type": "SubmitSequence/2", "sequence": 5})
    assert "malformed: Expected `str`, got `int` - at `$.sequence`" in line(wrong)


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93" * 2_000, b"\x81\x90\x00", b"plain text"])
def test_bytes_that_are_no_message_are_said_to_be_malformed(payload: bytes) -> None:
    assert "malformed: " in line(payload)


ESCAPES = msgpack.packb({"type": "Evil/1", "text": "\x1b[2J\r\nforged line"})


@given(st.binary(max_size=300), st.dictionaries(st.text(max_size=20), st.text(max_size=60), max_size=4))
@example(ESCAPES, {"Mr-Sender": "\x1b]0;owned\x07"})
def test_no_message_breaks_a_line_or_the_terminal(payload: bytes, headers: dict[str, str]) -> None:
    shown = line(payload, headers=headers, width=120)
    assert len(shown) <= 120
    assert shown.isprintable()


@pytest.mark.parametrize(("width", "cut"), [(70, True), (200, False)])
def test_a_line_is_cut_at_the_width_and_a_painted_one_reads_as_the_plain_one(width: int, cut: bool) -> None:
    bare, painted = (line(SUBMIT, headers=HEADERS, width=width, paint=paint) for paint in (False, True))
    assert (len(bare) == width, bare.endswith("…")) == (cut, cut)
    assert re.sub(r"\x1b\[\d+m", "", painted) == bare != painted


def test_the_json_form_is_complete() -> None:
    whole = message_object(reading(encode(SUBMIT), HEADERS))
    assert len(whole["body"].prompt_token_ids) == 5_000
    assert whole["type"] == "SubmitSequence/2"
    assert whole["reply_to"] == "_INBOX.x"
    assert "trouble" not in whole


@pytest.mark.parametrize(
    ("given_subject", "full"),
    [
        ("decision.>", "mr.local.decision.>"),
        (">", "mr.local.>"),
        ("mr.other.>", "mr.other.>"),
        ("$KV.mr_local_plan.>", "$KV.mr_local_plan.>"),
    ],
)
def test_the_prefix_may_be_left_out(given_subject: str, full: str) -> None:
    assert full_subject(given_subject, "mr.local") == full


KV = KvEndpoint(fingerprint="f", block_tokens=16, block_bytes=8, blocks=99, copiers=[CopierKind.SHARED_MEMORY])
M = "0ab672b7848f"

SPANS = {"frozen_ns": 4_000_000, "duration_ns": 60_000_000}
COST = MigrationCost(tokens=84, rounds=1, bytes=2**20, descriptors=2, copier="shared_memory", **SPANS)
FINISHED = plain(MigrationFinished, migration=M, sequence="r.0", reason=MoveReason.HANDOFF, epoch=2, cost=COST)

#: Of a move: ids by their first digits, spans and sizes with their units, lists bounded.
CONVERSATION: tuple[tuple[Body, str], ...] = (
    (MigrateSequence(sequence="r.0", target="w1"), "target=w1 within=2000ms"),
    (LeaseKv(migration=M, sequence="r.0", epoch=-1, from_block=0, lease_ms=9), "migration=0ab672 epoch=-1 "),
    (PullKv(migration=M, from_block=3, blocks=[[7], [8]], read_ms=5, round=2), "blocks=[[7] [8]] read=5ms round=2"),
    (EndLease(migration=M, sequence="r.0", epoch=1, moved=True), "moved=True"),
    (KvRefused(migration=M, reason=KvRefusal.CANCELLED, detail="x"), "reason=cancelled detail=x"),
    (FINISHED, "w0 → w1 moved handoff migration=0ab672 epoch=2 copier=shared_memory rounds=1 bytes=1.00MiB"),
    (
        MoveBid(ask="0c9f7c12aa", sequence="r", source="w0", bidder="w2", plan_epoch=3, refusal=BidRefusal.NO_ROOM),
        "ask=0c9f7c source=w0 bidder=w2 plan_epoch=3 refusal=no_room",
    ),
)


@pytest.mark.parametrize(("body", "text"), CONVERSATION, ids=[type(body).__name__ for body, _ in CONVERSATION])
def test_the_fields_of_a_move_are_shown_as_a_person_reads_them(body: Body, text: str) -> None:
    assert text in line(body)


def test_what_became_of_a_migration_is_told_in_a_line() -> None:
    assert told(FINISHED) == (
        "r.0 w0 → w1  moved in epoch 2: 84 tokens, no token for 4ms, 1 rounds, "
        "1.00 MiB in 2 pieces by shared_memory, 60ms in all"
    )
    assert set(REFUSALS) == set(KvRefusal)
    refused = msgspec.structs.replace(
        FINISHED, outcome=MigrationOutcome.REFUSED, refusal=KvRefusal.NO_TARGET, detail="w1: no room", target=""
    )
    assert told(refused) == "r.0 w0 → ?  refused: no instance can take it (no_target: w1: no room)"
    assert "nobody listens (is there a broker for w0?)" in migration_line("r.0", "w0", "nobody listens")


@pytest.mark.parametrize(("wanted", "is_it"), [("a", True), ("a.0", True), ("a.1", False), ("b", False)])
def test_a_request_or_one_of_its_sequences_is_meant(wanted: str, is_it: bool) -> None:
    assert is_of("a.0", wanted) is is_it
