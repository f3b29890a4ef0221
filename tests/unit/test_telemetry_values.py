"""Trace context as the W3C standard wants it, spans, histograms and metrics as values: no file, thread or socket."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace.actor.effects import RecordSpan
from millrace.actor.histograms import LatencyHistogram
from millrace.telemetry.otlp import readable_span
from millrace.telemetry.spans import SpanLine, decode_span, encode_span, span_line
from millrace.telemetry.tracecontext import (
    TraceContext,
    child,
    format_traceparent,
    new_trace,
    parse_traceparent,
    sample,
)
from opentelemetry.sdk.resources import Resource

ROOT = new_trace(random.Random(1), sampled=True)
OTHER = new_trace(random.Random(2), sampled=True)


def effect(**changes: object) -> RecordSpan:
    fields: dict[str, object] = {
        "name": "decode",
        "traceparent": format_traceparent(ROOT),
        "parent_span_id": "00f067aa0ba902b7",
        "start_ns": 1_000,
        "end_ns": 5_000,
        "attributes": {"millrace.output_tokens": 3},
        "links": [format_traceparent(OTHER)],
        "events": [("first_token", 2_000, {"index": 0})],
    }
    return RecordSpan(**(fields | changes))  # type: ignore[arg-type]


def line(**changes: object) -> SpanLine:
    return span_line(effect(**changes), service="worker", instance="w0", actor="w0")


def test_a_span_survives_its_line() -> None:
    assert decode_span(encode_span(line())) == line()


def test_a_line_that_was_cut_off_is_no_span() -> None:
    whole = encode_span(line())
    assert all(decode_span(whole[:cut]) is None for cut in range(len(whole)))
    assert decode_span(b"\xff\xfe") is None


def test_attributes_that_json_does_not_know_become_text() -> None:
    read = decode_span(encode_span(line(attributes={"what": ROOT.__class__})))
    assert "TraceContext" in read.attributes["what"]


def test_a_span_without_a_readable_context_is_none() -> None:
    assert span_line(effect(traceparent="00-bad"), service="worker", instance="w0", actor="w0") is None


def test_attributes_that_otlp_does_not_know_become_json_and_none_is_left_out() -> None:
    attributes = {"a": None, "b": [1, 2], "c": [1, "x"], "d": {"k": 1}, "e": True, "f": [], "g": [{"k": 1}]}
    exported = readable_span(line(attributes=attributes), Resource({})).attributes
    assert dict(exported) == {
        "b": [1, 2],
        "c": '[1, "x"]',
        "d": '{"k": 1}',
        "e": True,
        "f": "[]",
        "g": '[{"k": 1}]',
        "actor": "w0",
    }


def test_a_latency_histogram_counts_nanoseconds_and_tells_seconds() -> None:
    histogram = LatencyHistogram((0.001, 0.5))
    for duration_ns in (999_999, 1_000_000, 1_000_001, 500_000_000, 2_000_000_000):
        histogram.observe(duration_ns)
    assert histogram.buckets() == [("0.001", 2.0), ("0.5", 4.0), ("+Inf", 5.0)]
    assert histogram.sum == pytest.approx(2.503)
    assert histogram.mean_ns == pytest.approx(2.503e9 / 5)
    assert LatencyHistogram((1.0,)).mean_ns == 0


# Trace context.


TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(("version", "end", "sampled"), [("00", "03", True), ("00", "fe", False), ("cc", "01-x", True)])
def test_the_lowest_flag_means_sampled_and_a_later_version_is_read_as_far_as_00_goes(
    version: str, end: str, sampled: bool
) -> None:
    assert parse_traceparent(f"{version}-{TRACE}-{SPAN}-{end}") == TraceContext(TRACE, SPAN, sampled)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "nonsense",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"cc-{TRACE}-{SPAN}-01more",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-0x",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00_{TRACE}_{SPAN}_01",
    ],
)
def test_a_malformed_header_counts_as_absent(header: str) -> None:
    assert parse_traceparent(header) is None


@given(st.text(max_size=80))
def test_no_text_makes_parsing_fail(header: str) -> None:
    context = parse_traceparent(header)
    assert context is None or parse_traceparent(format_traceparent(context)) == context


@given(st.integers(), st.booleans())
def test_what_is_written_reads_back(seed: int, sampled: bool) -> None:
    context = new_trace(random.Random(seed), sampled=sampled)
    assert parse_traceparent(format_traceparent(context)) == context


def test_a_child_stays_in_its_trace_with_an_id_of_its_own() -> None:
    rng = random.Random(7)
    parent = new_trace(rng, sampled=True)
    first, second = child(parent, rng), child(parent, rng)
    assert first.trace_id == second.trace_id == parent.trace_id
    assert len({parent.span_id, first.span_id, second.span_id}) == 3
    assert first.sampled


def test_ids_are_never_all_zero() -> None:
    class Zeros(random.Random):
        """Draws zero first, as a rng does once in 2**64."""

        drawn = 0

        def getrandbits(self, bits: int) -> int:
            self.drawn += 1
            return 0 if self.drawn % 2 else 5

    context = new_trace(Zeros(), sampled=True)
    assert parse_traceparent(format_traceparent(context)) == context


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_the_share_of_sampled_traces_is_the_one_asked_for(share: float) -> None:
    rng = random.Random(1)
    hits = sum(sample(rng, share) for _ in range(20_000))
    assert hits / 20_000 == pytest.approx(share, abs=0.01)
    if share in (0.0, 1.0):
        assert hits == 20_000 * share
