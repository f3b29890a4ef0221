"""`millrace explain` and the drawn trace of a cascade's request: attempts, scores, thresholds, and why."""

import pytest
from millrace.actor.effects import RecordSpan
from millrace.cli.explain_spans import explained_by_spans
from millrace.cli.explain_text import told
from millrace.cli.field_text import duration
from millrace.cli.trace_tree import draw
from millrace.judging.calibration import IsotonicCurve
from millrace.judging.confidence import ConfidenceModel
from millrace.judging.evidence import ConfidenceFeature
from millrace.telemetry.spans import SpanLine, span_line

from tests.unit.cascade_core import CascadeBench, logprob
from tests.unit.ingress_core import MILLISECOND

TRACED = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.fixture
def bench() -> CascadeBench:
    """One traced request whose second tier answered."""
    bench = CascadeBench(70.0, 0.0)
    bench.ask(traceparent=TRACED)
    bench.now_ns += 40 * MILLISECOND
    bench.answer("abc$", logprob(60))
    bench.now_ns += 60 * MILLISECOND
    bench.answer("xy$", logprob(90))
    return bench


def spans(bench: CascadeBench) -> list[SpanLine]:
    lines = [span_line(e, service="ingress", instance="ingress-0", actor="ingress-0") for e in bench.made(RecordSpan)]
    return [line for line in lines if line is not None]


ATTEMPTS = [
    f"attempt r~1 on tier 0, small: rejected after {duration(40 * MILLISECOND)}",
    "  score 60 by confidence_uncalibrated, below the threshold 70 of plan 0, 4 output tokens",
    f"attempt r~2 on tier 1, middle: delivered after {duration(60 * MILLISECOND)}",
    "  score 90 by confidence_uncalibrated, 3 output tokens",
    "delivered because: last_tier",
]


def test_spans_tell_attempts_scores_and_thresholds(bench: CascadeBench):
    lines = told(explained_by_spans(spans(bench)))
    assert lines[0] == "request r, model casc, completed after 100ms, 3 prompt and 3 output tokens"
    assert [line for line in lines if line in ATTEMPTS] == ATTEMPTS
    assert [line.partition(" (")[0] for line in lines if line.startswith("dispatch of")] == [
        f"dispatch of r~1.0 to w-small, {duration(0)} after arrival",
        f"dispatch of r~2.0 to w-middle, {duration(40 * MILLISECOND)} after arrival",
    ]


def test_what_happened_is_of_the_attempt_that_was_delivered(bench: CascadeBench):
    """The client's first token is no engine's: it came when it was known who answers."""
    lines = told(explained_by_spans(spans(bench)))
    happened = lines[lines.index("what happened: completed") :]
    text = "\n".join(happened)
    assert "r~2, from the decision" in text
    assert "first token" not in text
    (whole,) = [line for line in happened if line.startswith("      end to end")]
    assert whole.split()[-2] == duration(60 * MILLISECOND)


def test_the_drawn_trace_has_a_span_for_each_attempt_with_its_dispatch_below(bench: CascadeBench):
    text = "\n".join(draw(spans(bench), width=200))
    assert text.count("attempt") >= 2
    assert "threshold=70" in text
    names = {span.name: span for span in spans(bench)}
    parents = {span.parent for span in spans(bench) if span.name == "dispatch"}
    attempts = {span.span for span in spans(bench) if span.name == "attempt"}
    assert parents == attempts
    assert names["attempt"].parent == names["ingress"].span


def test_the_score_of_an_attempt_that_was_rejected_early_is_a_bound():
    curve = IsotonicCurve((-4.0, 0.0), (0.0, 1.0))
    judge = ConfidenceModel(model="small", feature=ConfidenceFeature.SUM, curve=curve, answers=100, area=1.0, error=0.0)
    bench = CascadeBench(70.0, 0.0, judges={"small": judge})
    bench.ask(traceparent=TRACED)
    bench.answer("a", -2.0, end=False)
    bench.answer("xy$", logprob(90))
    lines = told(explained_by_spans(spans(bench)))
    assert "  score at most 50 by confidence, below the threshold 70 of plan 0, 1 output tokens" in lines
