"""`millrace explain`: from an ingress's spans to who was considered and what happened."""

import re
from typing import Any

import msgspec
import pytest
from millrace.actor.effects import RecordSpan
from millrace.cli.errors import CliError
from millrace.cli.explain_spans import explained_by_spans
from millrace.cli.explain_text import told
from millrace.cli.explained import Explained, ExplainedPlacement
from millrace.cli.field_text import duration
from millrace.cli.trace_reading import attribute
from millrace.cli.trace_tree import draw
from millrace.contracts.ingress import FinishReason
from millrace.contracts.migration import KvReplicated
from millrace.contracts.observers import CandidateForecast, CandidateScore
from millrace.contracts.worker import Sampling, SequenceAccepted
from millrace.judging.calibration import IsotonicCurve
from millrace.judging.confidence import ConfidenceModel
from millrace.judging.evidence import ConfidenceFeature
from millrace.telemetry.spans import SpanLine, span_line

from services.ingress.config import DispatchConfig, IngressConfig
from tests.testbed.messages import decision
from tests.unit.cascade_core import CascadeBench, logprob
from tests.unit.ingress_core import MILLISECOND as MS
from tests.unit.ingress_core import NO_TAG, START, Bench, chunk
from tests.unit.ingress_moving import MoveBench

TRACED = f"00-{'a' * 32}-{'b' * 16}-01"


def served(policy: str = "forecast", *, dies: bool = False, **call: Any) -> Bench:
    """One traced request of four tokens over an ingress with two instances."""
    parameters = {"ttft_weight": 0.0} if policy == "forecast" else {}
    dispatch = DispatchConfig(policy=policy, parameters=parameters)
    bench = Bench(IngressConfig(tagging=NO_TAG, dispatch=dispatch))
    bench.call(traceparent=TRACED, prompts=[[1, 2, 3]], **call)
    if policy == "forecast":
        bench.now_ns += 2 * MS
        bench.gathered(bench.predicted("w0", 120, 8, tpot_mean_ns=3 * MS, snapshot_age_ns=30 * MS))
    bench.accept()
    _, instance = bench.last_submission()
    bench.now_ns += 10 * MS
    bench.tokens(instance, chunk("ab"))
    epoch = 0
    if dies:
        bench.die(instance)
        bench.gathered(bench.predicted("w1", 50))
        bench.accept()
        instance, epoch = "w1", 1
    bench.now_ns += 90 * MS
    bench.tokens(instance, chunk("cd", 2, epoch=epoch, finish=FinishReason.LENGTH))
    return bench


def spans_of(bench: Bench | CascadeBench) -> list[SpanLine]:
    lines = [span_line(e, service="ingress", instance="ingress-0", actor="ingress-0") for e in bench.made(RecordSpan)]
    return [line for line in lines if line is not None]


def test_spans_say_who_was_considered_what_was_predicted_and_what_happened():
    text = told(explained_by_spans(spans_of(served())))
    assert text == [
        "request r, model tiny, completed after 102ms, 3 prompt and 4 output tokens",
        "",
        "dispatch of r.0 to w0, 2ms after arrival",
        "  by forecast: lowest of 1: 120 ms = predicted end to end",
        "  1 of 2 asked were predicted in 2ms, with an unknown output length:",
        "      instance  end to end  TTFT  TPOT  others later  preempted  cached  snapshot age",
        "    → w0             120ms   8ms   3ms             0          0       0  30ms",
        "      w1        no answer in time",
        "",
        "what happened: completed",
        "  decoded by w0",
        "    from the decision  predicted  actual  error",
        "      first token            8ms    10ms  -20.0 %",
        "      end to end           120ms   100ms  +20.0 %",
        "      output tokens            -       4  -",
    ]


def test_a_continuation_is_told_with_its_cause_and_spoils_the_comparison():
    bench = served(dies=True, sampling=Sampling(max_tokens=4, ignore_eos=True))
    text = "\n".join(told(explained_by_spans(spans_of(bench))))
    assert "with 4 output tokens expected:" in text
    assert "continuation of r.0 to w1 (epoch 1), 12ms after arrival" in text
    assert "by forecast: instance_dead; lowest of 1: 50 ms = predicted end to end" in text
    assert "2 output tokens were there already" in text
    assert "went on elsewhere once" in text
    assert "decoded by w0, w1" in text


def test_a_continuation_on_a_replica_is_told_with_what_the_replica_had():
    bench = MoveBench(traceparent=TRACED)
    bench.tokens(bench.source, chunk("ab"))
    where = {"instance": bench.target, "incarnation": bench.incarnations[bench.target]}
    bench.send(KvReplicated(sequence="r.0", epoch=0, replica="m", tokens=3, **where))
    bench.die(bench.source)
    bench.reply(bench.submissions()[-1], SequenceAccepted(sequence="r.0", epoch=1, kv_tokens=3))
    bench.tokens(bench.target, chunk("c", 2, epoch=1, finish=FinishReason.LENGTH))
    text = "\n".join(told(explained_by_spans(spans_of(bench))))
    assert f"continuation of r.0 to {bench.target}" in text
    assert "by kv_replica: instance_dead; it holds the KV of 3 of" in text
    assert "3 tokens needed no computing there" in text


def test_a_moved_request_is_told_with_both_stays_its_predicted_rest_and_what_came_of_it():
    bench = MoveBench(traceparent=TRACED)
    bench.tokens(bench.source, chunk("ab"))
    bench.now_ns += 5 * MS
    bench.allot()
    bench.now_ns += 20 * MS
    bench.moved(2)
    bench.tokens(bench.target, chunk("c", 2, epoch=1, finish=FinishReason.LENGTH))
    spans = spans_of(bench)
    assert any("goes on from dispatch" in line for line in draw(sorted(spans, key=lambda s: s.start_ns), width=120))
    move = next(span for span in spans if span.name == "move")
    told_by_migrator = {
        "millrace.migration": attribute(move, "migration"),
        "millrace.reason": "scheduler",
        "millrace.note": "balance: 300 tokens, 120 tokens expected to come (90 %: 400 at most); saves 0.80 s in all",
        "millrace.rounds": 2,
        "millrace.bytes": 4096,
        "millrace.frozen_ms": 11.0,
    }
    migration = msgspec.structs.replace(move, name="migration", span="f" * 16, attributes=told_by_migrator)
    text = "\n".join(told(explained_by_spans([*spans, migration])))
    assert f"migration of r.0 to {bench.target} (epoch 1), 5ms after arrival" in text
    assert f"  with its KV from {bench.source}, 2 output tokens in" in text
    assert "moved with its KV once" in text
    assert f"decoded by {bench.source}, {bench.target}" in text
    assert "asked for by: scheduler" in text
    assert "because: balance: 300 tokens, 120 tokens expected to come (90 %: 400 at most); saves 0.80 s in all" in text
    assert "copied in 2 rounds, 4096 bytes, no token for 11ms" in text
    assert "1 output tokens came since" in text


def placement(*, trouble: str = "", **fields) -> ExplainedPlacement:
    return ExplainedPlacement(decision=decision("r", **{"at_ns": START, "reason": "why"} | fields), trouble=trouble)


def test_a_fallback_a_refusal_and_a_running_request_are_said_to_be_that():
    explained = Explained(
        request="r",
        model="m",
        placements=[
            placement(
                fallback="join_shortest_queue",
                forecasts=[CandidateForecast("w0", note="stale_snapshot")],
                trouble="full",
            ),
            placement(chosen="", scores=[CandidateScore("w0", 0.0, "draining")]),
        ],
    )
    text = "\n".join(told(explained))
    assert "by forecast, whose fallback join_shortest_queue decided: why" in text
    assert re.search("→ w0 +stale_snapshot", text)
    assert "it came to nothing: full" in text
    assert "dispatch of r.0 to nobody" in text
    assert "w0 (draining)" in text
    assert "Nothing of its end is recorded" in text


@pytest.mark.parametrize("attributes", [{"forecasts": "not json"}, {"forecasts": "[[1]]"}, {"forecasts": 7}, {}])
def test_spans_with_unreadable_or_missing_attributes_are_told_as_far_as_they_go(attributes):
    line = SpanLine(
        trace="a" * 32,
        span="c" * 16,
        name="dispatch",
        service="ingress",
        instance="ingress-0",
        start_ns=START,
        end_ns=START,
        attributes={"scores": "nonsense, =, w0=x"} | attributes,
    )
    text = told(explained_by_spans([line]))
    assert "  nobody was asked for a prediction, and no score is recorded" in text


def test_what_is_not_there_is_refused_in_a_sentence():
    with pytest.raises(CliError, match="not recorded"):
        explained_by_spans([])


# cascades


@pytest.fixture
def cascade() -> CascadeBench:
    """One traced request whose second tier answered."""
    bench = CascadeBench(70.0, 0.0)
    bench.ask(traceparent=TRACED)
    bench.now_ns += 40 * MS
    bench.answer("abc$", logprob(60))
    bench.now_ns += 60 * MS
    bench.answer("xy$", logprob(90))
    return bench


ATTEMPTS = [
    f"attempt r~1 on tier 0, small: rejected after {duration(40 * MS)}",
    "  score 60 by confidence_uncalibrated, below the threshold 70 of plan 0, 4 output tokens",
    f"attempt r~2 on tier 1, middle: delivered after {duration(60 * MS)}",
    "  score 90 by confidence_uncalibrated, 3 output tokens",
    "delivered because: last_tier",
]


def test_spans_tell_attempts_scores_and_thresholds(cascade: CascadeBench):
    lines = told(explained_by_spans(spans_of(cascade)))
    assert lines[0] == "request r, model casc, completed after 100ms, 3 prompt and 3 output tokens"
    assert [line for line in lines if line in ATTEMPTS] == ATTEMPTS
    assert [line.partition(" (")[0] for line in lines if line.startswith("dispatch of")] == [
        f"dispatch of r~1.0 to w-small, {duration(0)} after arrival",
        f"dispatch of r~2.0 to w-middle, {duration(40 * MS)} after arrival",
    ]


def test_what_happened_is_of_the_attempt_that_was_delivered(cascade: CascadeBench):
    """The client's first token is no engine's: it came when it was known who answers."""
    lines = told(explained_by_spans(spans_of(cascade)))
    happened = lines[lines.index("what happened: completed") :]
    text = "\n".join(happened)
    assert "r~2, from the decision" in text
    assert "first token" not in text
    (whole,) = [line for line in happened if line.startswith("      end to end")]
    assert whole.split()[-2] == duration(60 * MS)


def test_the_score_of_an_attempt_that_was_rejected_early_is_a_bound():
    curve = IsotonicCurve((-4.0, 0.0), (0.0, 1.0))
    judge = ConfidenceModel(model="small", feature=ConfidenceFeature.SUM, curve=curve, answers=100, area=1.0, error=0.0)
    bench = CascadeBench(70.0, 0.0, judges={"small": judge})
    bench.ask(traceparent=TRACED)
    bench.answer("a", -2.0, end=False)
    bench.answer("xy$", logprob(90))
    lines = told(explained_by_spans(spans_of(bench)))
    assert "  score at most 50 by confidence, below the threshold 70 of plan 0, 1 output tokens" in lines
