"""Spans, histograms and metrics as values: no file, thread or socket."""

import random

import pytest
from millrace.actor.effects import RecordSpan
from millrace.actor.histograms import LatencyHistogram
from millrace.telemetry.otlp import readable_span
from millrace.telemetry.spans import SpanLine, decode_span, encode_span, span_line
from millrace.telemetry.tracecontext import format_traceparent, new_trace
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
