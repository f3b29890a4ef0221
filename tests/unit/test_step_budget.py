"""Step budgets that change while an engine runs: the worker's order, and what vLLM's adapter makes of it."""

import logging
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from millrace.actor.effects import Effect, Log, RecordSpan, StartTimer
from millrace.actor.engine import EngineObserved, LimitStepInEngine, SequenceAdded
from millrace.contracts.ingress import FinishReason
from millrace.contracts.local import TimerFired
from millrace.contracts.scheduler import SchedulerConfig, step_budget
from millrace.contracts.status import InstanceSummary, StatusSnapshot
from millrace.contracts.worker import SetStepBudget

from services.worker.vllm_engine.step_limit import StepLimit
from tests.unit.worker_rig import START, TRACE, Bench, bodies, only, out, snapshot


@pytest.mark.parametrize(
    ("asked", "chunked", "found"),
    [(0, True, 64), (-3, True, 64), (32, True, 32), (1, True, 5), (64, True, 64), (1000, True, 64), (32, False, 64)],
)
def test_a_budget_leaves_every_sequence_its_decode_and_never_exceeds_the_engines(
    asked: int, chunked: bool, found: int
) -> None:
    config = SchedulerConfig(
        max_model_len=64, max_sequences=4, token_budget=64, block_size=16, blocks_total=32, chunked_prefill=chunked
    )
    assert step_budget(config, asked) == found


def order(bench: Bench, tokens: int, *, valid_ms: int = 5_000, incarnation: int = 7, after_ms: float = 0) -> list[int]:
    """Gives an order; the bounds that the engine is told."""
    body = SetStepBudget(incarnation=incarnation, tokens=tokens, valid_ms=valid_ms)
    return [effect.tokens for effect in only(bench.say(body, after_ms=after_ms), LimitStepInEngine)]


def fired(bench: Bench, after_ms: float) -> list[Effect]:
    return bench.say(TimerFired(name="step_budget"), after_ms=after_ms)


def test_an_order_bounds_steps_until_it_expires() -> None:
    bench = Bench()
    effects = bench.say(SetStepBudget(incarnation=7, tokens=16, valid_ms=5_000))
    assert only(effects, LimitStepInEngine) == [LimitStepInEngine(tokens=16)]
    assert only(effects, StartTimer) == [StartTimer(name="step_budget", at_ns=START + 5_000_000_000)]
    assert only(effects, Log)
    assert only(fired(bench, 5_000), LimitStepInEngine) == [LimitStepInEngine(tokens=0)]
    assert fired(bench, 5_000) == []


def test_an_order_that_is_repeated_lasts_and_tells_the_engine_nothing_new() -> None:
    bench = Bench()
    assert order(bench, 16) == [16]
    assert order(bench, 16, after_ms=4_000) == []
    later = fired(bench, 1_000)
    assert only(later, LimitStepInEngine) == []
    assert only(later, StartTimer) == [StartTimer(name="step_budget", at_ns=START + 9_000_000_000)]
    assert only(fired(bench, 4_000), LimitStepInEngine) == [LimitStepInEngine(tokens=0)]


def test_another_bound_replaces_the_one_in_force_and_zero_ends_it() -> None:
    bench = Bench()
    assert [order(bench, tokens) for tokens in (16, 32, 0, 0, 1)] == [[16], [32], [0], [], [3]]


@pytest.mark.parametrize(
    "wrong",
    [{"incarnation": 6}, {"tokens": -1}, {"valid_ms": 0}, {"valid_ms": 10**9}],
    ids=["another incarnation", "negative tokens", "no time", "for ever"],
)
def test_an_order_for_another_incarnation_or_out_of_range_is_ignored(wrong: dict[str, int]) -> None:
    bench = Bench()
    values = {"incarnation": 7, "tokens": 16, "valid_ms": 5_000} | wrong
    assert only(bench.say(SetStepBudget(**values)), LimitStepInEngine) == []


def test_status_and_summary_tell_the_bound_that_the_engine_tells() -> None:
    bench = Bench()
    told = msgspec.structs.replace(snapshot(START + 10**9), token_budget=16)
    effects = bench.say(EngineObserved(snapshot=told), after_ms=1_000)
    assert [body.token_budget for body in bodies(effects, StatusSnapshot | InstanceSummary)] == [16, 16]


def test_spans_tell_the_bound_while_a_sequence_was_there_and_explain_shows_it() -> None:
    bench = Bench()
    told = []
    for sequence, before in (("a.0", []), ("b.0", [16]), ("c.0", [0]), ("d.0", [])):
        for tokens in before:
            order(bench, tokens)
        bench.submit(sequence, traceparent=TRACE)
        bench.say(SequenceAdded(sequence=sequence), after_ms=1)
        effects = bench.step(out(1, sequence=sequence, finish=FinishReason.LENGTH))
        told.append(only(effects, RecordSpan)[-1].attributes.get("millrace.step_tokens_max", 0))
    assert told == [0, 16, 0, 0]


def scheduler(*, chunked: bool = True, speculative: object = None, **attributes: Any) -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(enable_chunked_prefill=chunked),
        vllm_config=SimpleNamespace(speculative_config=speculative),
        **attributes,
    )


def test_a_bound_is_set_and_the_engines_own_budget_comes_back() -> None:
    known = scheduler(max_num_scheduled_tokens=8192)
    limit, found = StepLimit(known), []
    for tokens in (512, 9_000, 300, 0):
        limit.set(tokens)
        found.append((known.max_num_scheduled_tokens, limit.tokens))
    assert found == [(512, 512), (8192, 0), (300, 300), (8192, 0)]


@pytest.mark.parametrize(
    ("known", "why"),
    [
        (scheduler(), "has no max_num_scheduled_tokens"),
        (scheduler(chunked=False, max_num_scheduled_tokens=8192), "chunked prefill is off"),
        (scheduler(speculative=object(), max_num_scheduled_tokens=8192), "decodes speculatively"),
    ],
)
def test_an_engine_that_cannot_keeps_its_budget_and_says_so_once(
    known: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    before, limit = getattr(known, "max_num_scheduled_tokens", None), StepLimit(known)
    with caplog.at_level(logging.WARNING):
        limit.set(512)
        limit.set(300)
    assert (getattr(known, "max_num_scheduled_tokens", None), limit.tokens) == (before, 0)
    assert len([record for record in caplog.records if why in record.getMessage()]) == 1
