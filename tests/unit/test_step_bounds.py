"""Bounds of steps: how many tokens decodes leave to prompts, and the orders that say so to instances."""

import math

import msgspec
import pytest
from millrace.actor.effects import Publish
from millrace.contracts.local import KeyChanged, TimerFired
from millrace.contracts.message import Message
from millrace.contracts.observers import DecisionMade
from millrace.contracts.plan import Lease, Plan, Stage
from millrace.contracts.status import InstanceRecord, InstanceSummary, LoadIndicators, PhaseQueues
from millrace.contracts.worker import SetStepBudget
from millrace.policies.stages.instance import InstanceModel
from millrace.policies.step_bounds import (
    SLOWDOWN_MAX,
    STEP_SHARE,
    STEP_TOKENS_MIN,
    StepLoad,
    StepObjectives,
    step_bound,
)

from services.coordinator.config import CoordinatorConfig
from services.coordinator.led_models import TICK_NS
from services.coordinator.step_bounds import SUMMARY_NS, VALID_MS, StepBoundsActor
from tests.unit.coordinator_bench import MODEL, record, summary

MODEL_COSTS = InstanceModel(
    fixed_s=0.01,
    per_decode_s=1e-4,
    per_context_token_s=1e-7,
    per_prefill_token_s=1e-5,
    kv_tokens=100_000.0,
    max_sequences=128.0,
)
BUDGET = 8192
FAIR = StepObjectives(ttft_s=3.0, tpot_s=0.05)
MIXED = StepLoad(backlog=9_000, decoding=50, context=20_000, prompt=2_000, arrives=True)
DECODE_S, TOKEN_S = 0.01 + 50 * 1e-4 + 20_000 * 1e-7, 1e-5


def bound(load: StepLoad = MIXED, budget: int = BUDGET, objectives: StepObjectives = FAIR) -> int | None:
    return step_bound(load, MODEL_COSTS, budget, objectives)


def test_a_step_beside_prompts_is_bounded_to_its_share_of_the_objective() -> None:
    assert bound() == math.ceil(50 + (STEP_SHARE * 0.05 - DECODE_S) / TOKEN_S)


def test_where_prompts_are_late_a_bound_costs_a_share_of_their_throughput_at_most() -> None:
    def rate(tokens: float) -> float:
        return (tokens - 50) / (DECODE_S + (tokens - 50) * TOKEN_S)

    tokens = bound(msgspec.structs.replace(MIXED, backlog=2_000_000))
    assert rate(tokens) >= (1 - SLOWDOWN_MAX) * rate(BUDGET) > rate(tokens - 2)


def test_no_step_is_bounded_below_the_least_nor_at_the_engines_own_budget() -> None:
    crowded = msgspec.structs.replace(MIXED, decoding=30, context=900_000)
    assert bound(crowded, objectives=StepObjectives(ttft_s=100.0, tpot_s=0.05)) == STEP_TOKENS_MIN
    assert bound(budget=1000) is None, "its whole budget is within the share already"


@pytest.mark.parametrize(
    ("fields", "bounded"),
    [
        ({}, True),
        ({"backlog": 0}, True),
        ({"backlog": 0, "arrives": False}, False),
        ({"decoding": 0}, False),
        ({"arrives": False}, True),
    ],
)
def test_bounds_are_for_decodes_beside_prompts(fields: dict[str, float], bounded: bool) -> None:
    assert (bound(msgspec.structs.replace(MIXED, **fields)) is not None) is bounded


NAME = "w0"


def loaded(at_ns: int, *, prefill_tokens_left: int = 9_000) -> InstanceSummary:
    load = LoadIndicators(decode=PhaseQueues(running=50), prefill_tokens_left=prefill_tokens_left)
    return msgspec.structs.replace(summary(NAME), at_ns=at_ns, running_tokens=20_000, indicators=load)


class Story:
    """One instance of a model that is led here."""

    def __init__(self) -> None:
        config = CoordinatorConfig(name="c", step_bounds=StepObjectives(tpot_s=0.05))
        self.actor = StepBoundsActor(config, incarnation=1, instance_model=lambda _record: MODEL_COSTS)
        self.now_ns = 100 * TICK_NS
        self.actor.start(self.now_ns)
        self.lead(True)
        self.send(KeyChanged(bucket="instance", key=NAME, value=self.registered(), revision=1))
        stage = Stage(name="s0", length_min=0, length_max=None, instances=[NAME])
        plan = Plan(model=MODEL, epoch=1, stages=[stage], coordinator="c")
        self.send(KeyChanged(bucket="plan", key=MODEL, value=plan, revision=1))

    def registered(self) -> InstanceRecord:
        return msgspec.structs.replace(record(NAME), token_budget=BUDGET)

    def lead(self, leads: bool) -> None:
        lease = Lease(model=MODEL, holder="c" if leads else "d", incarnation=1, until_ns=self.now_ns + 60 * TICK_NS)
        self.send(KeyChanged(bucket="lease", key=MODEL, value=lease, revision=1))

    def send(self, body: object) -> list[SetStepBudget]:
        effects = self.actor.handle(Message(body), self.now_ns)  # type: ignore[arg-type]
        self.actor.check_invariants()
        return [e.body for e in effects if isinstance(e, Publish) and isinstance(e.body, SetStepBudget)]

    def tick(self) -> list[SetStepBudget]:
        self.now_ns += TICK_NS
        return self.send(TimerFired(name="tick"))


def test_a_bound_is_repeated_while_it_is_wanted_and_ended_once() -> None:
    story = Story()
    assert story.tick() == [], "nothing is known"
    story.send(loaded(story.now_ns))
    (order,) = story.tick()
    assert (order.incarnation, order.valid_ms) == (5, VALID_MS)
    assert STEP_TOKENS_MIN <= order.tokens < BUDGET
    assert story.tick() == [order]
    assert story.actor.snapshot() == {"step_bounds": {MODEL: {NAME: order.tokens}}}
    story.send(loaded(story.now_ns, prefill_tokens_left=0))
    assert [order.tokens for order in story.tick()] == [0]
    assert story.tick() == []


def test_new_requests_hold_up_decodes_too() -> None:
    story = Story()
    story.send(loaded(story.now_ns, prefill_tokens_left=0))
    assert story.tick() == []
    fields = {"sequences": ["r/0"], "epoch": 0, "policy": "p", "reason": "", "prompt_tokens": 2000}
    story.send(DecisionMade(request="r", kind="dispatch", model=MODEL, chosen=NAME, **fields))  # type: ignore[arg-type]
    assert story.tick() != []


def test_of_an_instance_that_is_silent_nothing_is_ordered() -> None:
    story = Story()
    story.send(loaded(story.now_ns))
    story.now_ns += SUMMARY_NS + TICK_NS
    assert story.tick() == []


def test_without_the_lease_nothing_is_ordered() -> None:
    story = Story()
    story.send(loaded(story.now_ns))
    assert story.tick() != []
    story.lead(False)
    assert story.tick() == []
    assert story.actor.snapshot() == {"step_bounds": {}}
