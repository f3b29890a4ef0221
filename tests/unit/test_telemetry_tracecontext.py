"""Trace context as the W3C standard wants it."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace.telemetry.tracecontext import (
    TraceContext,
    child,
    format_traceparent,
    new_trace,
    parse_traceparent,
    sample,
)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_only_the_lowest_flag_means_sampled() -> None:
    assert parse_traceparent(f"00-{TRACE}-{SPAN}-03") == TraceContext(TRACE, SPAN, True)
    assert parse_traceparent(f"00-{TRACE}-{SPAN}-fe") == TraceContext(TRACE, SPAN, False)


def test_a_later_version_is_read_as_far_as_version_00_goes() -> None:
    assert parse_traceparent(f"cc-{TRACE}-{SPAN}-01-what-comes-later") == TraceContext(TRACE, SPAN, True)
    assert parse_traceparent(f"cc-{TRACE}-{SPAN}-01") == TraceContext(TRACE, SPAN, True)


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
