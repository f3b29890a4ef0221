"""The wire codec: every type and sequence id there and back, and what is none."""

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace.actor.headers import read_header, read_headers, read_status, write_headers
from millrace.contracts.catalog import WIRE_TYPES
from millrace.contracts.codec import PAYLOAD_BYTES_MAX, MalformedMessage, decode, encode
from millrace.contracts.ingress import FinishReason, TokenChunk, TokenLogprobs, TokensGenerated
from millrace.contracts.message import ErrorReply
from millrace.contracts.sequences import SequenceId, request_id_of
from millrace.contracts.tagger import LengthTag
from millrace.contracts.worker import Sampling, SubmitSequence

BODIES = [
    ErrorReply(reason="malformed", detail="é ✓"),
    LengthTag(request="r", mean=1.5, p90=9.0),
    SubmitSequence(
        sequence="r.0",
        epoch=2,
        ingress="i",
        ingress_incarnation=1_700_000_000_000_000_000,
        prompt_token_ids=[1, 2, 3],
        output_token_ids=[4],
        sampling=Sampling(max_tokens=5, logit_bias={7: -1.0}, seed=2**63 - 1),
    ),
    TokensGenerated(
        instance="w",
        incarnation=1,
        step=3,
        chunks=[
            TokenChunk("r.0", 2, 4, [9, 10], FinishReason.STOP, [TokenLogprobs([9], [-0.1], 1)], 3),
            TokenChunk("r.1", 0, 0, []),
        ],
    ),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_a_body_comes_back_equal(body):
    assert decode(encode(body)) == body


def test_every_wire_type_has_a_versioned_tag_of_its_own():
    names = [kind.type_name() for kind in WIRE_TYPES]
    assert len(set(names)) == len(names)
    assert all(name.rpartition("/")[2].isdigit() for name in names)


def test_unknown_fields_are_skipped():
    payload = msgspec.msgpack.encode({"type": "LengthTag/1", "request": "r", "colour": "blue"})
    assert decode(payload) == LengthTag(request="r")


@pytest.mark.parametrize(
    ("payload", "kind"),
    [
        (b"", "undecodable"),
        (b"\xc1", "undecodable"),
        (msgspec.msgpack.encode({"type": "LengthTag/2", "request": "r"}), "invalid"),
        (msgspec.msgpack.encode({"type": "LengthTag/1"}), "invalid"),
        (msgspec.msgpack.encode({"type": "LengthTag/1", "request": 7}), "invalid"),
        (msgspec.msgpack.encode([1, 2]), "invalid"),
        (b"\x91" * 5000 + b"\xc0", "invalid"),
        (b"x" * (PAYLOAD_BYTES_MAX + 1), "too_large"),
    ],
    ids=["empty", "reserved", "version", "missing", "type", "no map", "deep", "large"],
)
def test_what_is_no_message_says_its_kind(payload: bytes, kind: str):
    with pytest.raises(MalformedMessage) as caught:
        decode(payload)
    assert caught.value.kind == kind


@given(st.integers(0, 200), st.integers(0, 255))
def test_a_flipped_byte_is_a_body_or_malformed_and_nothing_else(place: int, value: int):
    payload = bytearray(encode(BODIES[3]))
    payload[place % len(payload)] = value
    with suppress(MalformedMessage):
        decode(bytes(payload))


def test_headers_read_back_what_was_written():
    headers = write_headers("LengthTag/1", "ingress-0", "r1", "00-aa-bb-01")
    assert headers.startswith(b"NATS/1.0\r\n")
    assert headers.endswith(b"\r\n\r\n")
    assert read_headers(headers) == ("ingress-0", "00-aa-bb-01")
    assert read_header(headers, "Mr-Type") == "LengthTag/1"
    assert read_header(headers, "Mr-Request") == "r1"
    assert read_header(headers, "Mr-None") == ""


def test_headers_may_be_missing_altogether():
    assert read_headers(b"") == ("", "")
    assert read_headers(b"NATS/1.0\r\nX: y\r\n\r\n") == ("", "")
    assert read_status(b"NATS/1.0\r\nX: y\r\n\r\n") == ""


def test_a_line_end_in_a_value_cannot_add_a_header():
    headers = write_headers("T/1", "s\r\nMr-Sender: forged", "r\nX: y", "")
    assert read_headers(headers)[0] == "s  Mr-Sender: forged"
    assert headers.count(b"\r\n") == 5


def test_a_status_line_is_told_from_ordinary_headers():
    assert read_status(b"NATS/1.0 503\r\n\r\n") == "503"
    assert read_status(b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 4\r\n\r\n") == "100"
    assert read_header(b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 4\r\n\r\n", "Nats-Last-Consumer") == "4"


@given(st.binary(max_size=100))
def test_header_bytes_of_strangers_never_raise(junk: bytes):
    read_headers(b"NATS/1.0\r\n" + junk)
    read_status(junk)


@given(request=st.text(min_size=1), index=st.integers(min_value=0))
def test_a_sequence_id_that_is_written_is_read_again(request: str, index: int):
    written = str(SequenceId(request, index))
    assert SequenceId.parse(written) == SequenceId(request, index)
    assert request_id_of(written) == request
    assert request_id_of("r") == "r", "no sequence"


@pytest.mark.parametrize("text", ["", "r", "r.", ".0", "r.x", "r.-1", "r.²"])
def test_text_that_is_no_sequence_id_is_refused(text: str):
    with pytest.raises(ValueError, match="not a sequence id"):
        SequenceId.parse(text)
