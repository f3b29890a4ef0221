"""Replanning of a cascade: by rate and tiers only, with a pause, once at a time; what a failed planner changes."""

from random import Random

import msgspec
import pytest
from millrace.actor.effects import Effect, Log, PutKey
from millrace.cascade.jobs import PlanningResult
from millrace.contracts.cascade import CascadePlan, CascadeTier, FrontPoint
from millrace.contracts.local import KeyChanged
from millrace.contracts.observers import RequestFinished

from services.coordinator.cascade_config import CoordinatedCascade, CoordinatedTier
from services.coordinator.cascade_effects import CascadePlanned, CascadePlanningFailed, PlanCascade
from services.coordinator.cascade_planning import (
    REQUESTS_MIN,
    ArrivalRate,
    CascadeState,
    FinishedCall,
    planned,
    why_plan,
)
from tests.testbed.messages import plain
from tests.unit.test_coordinator_cascades import Story

S = 1_000_000_000
TIERS = [CoordinatedTier(model="nano", threshold=60.0, judge="j"), CoordinatedTier(model="mini", threshold=0.0)]
CASCADE = CoordinatedCascade(name="c", tiers=TIERS, quality=50.0, sample="s.jsonl", pause_s=30.0)
ALIVE = (("w0", "nano"), ("w1", "mini"))
CHOSEN = FrontPoint(thresholds=[75.0], instances=[1, 1], shares=[1.0, 0.4], quality=52.0, quality_low=50.5, p95_s=1.5)


class PlannedStory(Story):
    """A coordinator whose planners are seen."""

    def __init__(self, cascade: CoordinatedCascade = CASCADE) -> None:
        self.jobs: list[PlanCascade] = []
        super().__init__(cascade)
        self.rng = Random(5)
        for name, model in ALIVE:
            self.register(name, model)

    def send(self, body: msgspec.Struct) -> list[Effect]:  # type: ignore[override]
        effects = super().send(body)  # type: ignore[arg-type]
        self.jobs += [effect for effect in effects if isinstance(effect, PlanCascade)]
        return effects

    def run(self, seconds: int, *, rate: float = 2.0) -> None:
        """Traffic of so many requests a second."""
        for _ in range(seconds):
            at_s = self.rng.expovariate(rate)
            while at_s < 1:
                self.send(self.outcome())
                at_s += self.rng.expovariate(rate)
            self.tick(1.0, alive=ALIVE)

    def outcome(self, model: str = "c") -> RequestFinished:
        return plain(RequestFinished, request="r", model=model, arrival_ns=self.now_ns)

    def answer(self, result: PlanningResult) -> list[Effect]:
        return self.send(CascadePlanned(key="c", result=result))


FRONT = [CHOSEN, msgspec.structs.replace(CHOSEN, thresholds=[90.0], quality=55.0, p95_s=2.5)]
RESULT = PlanningResult(chosen=CHOSEN, meets=True, reason="least p95", front=FRONT)


@pytest.fixture
def story() -> PlannedStory:
    """One whose first planner is at work."""
    story = PlannedStory()
    story.run(65)
    return story


def test_the_first_plan_waits_for_some_requests_and_asks_once_for_what_is_there() -> None:
    story = PlannedStory()
    story.run(5)
    assert story.jobs == []
    story.run(295)
    (effect,) = story.jobs
    job = effect.job
    assert (job.quality, job.sample, job.thresholds) == (50.0, "s.jsonl", [])
    assert [(tier.model, tier.instances) for tier in job.tiers] == [("nano", 1), ("mini", 1)]
    assert job.rate == pytest.approx(2.0, rel=0.3)


@pytest.mark.parametrize("meets", [True, False])
def test_a_result_comes_into_force_with_what_is_expected_of_it(story: PlannedStory, meets: bool) -> None:
    story.answer(msgspec.structs.replace(RESULT, meets=meets))
    plan = story.plan
    assert [(tier.threshold, tier.share) for tier in plan.tiers] == [(75.0, 1.0), (0.0, 0.4)]
    assert (plan.quality, plan.quality_low, plan.p95_ns, plan.meets) == (52.0, 50.5, 1_500_000_000, meets)
    assert plan.front == FRONT
    assert "first requests" in plan.reason


def test_only_a_rate_that_changes_starts_a_planner_that_looks_at_the_plan_in_force(story: PlannedStory) -> None:
    story.answer(RESULT)
    story.run(600)
    assert len(story.jobs) == 1
    story.run(400, rate=5.0)
    assert len(story.jobs) == 2
    assert story.jobs[1].job.thresholds == [75.0]
    assert story.jobs[1].job.planned_p95_s == 1.5
    story.answer(msgspec.structs.replace(RESULT, chosen=msgspec.structs.replace(CHOSEN, thresholds=[65.0])))
    assert story.plan.reason.startswith("rate ")


def test_a_tier_that_has_gone_is_reason_enough_to_plan(story: PlannedStory) -> None:
    story.answer(RESULT)
    story.send(KeyChanged(bucket="instance", key="w0", value=None, revision=0))
    for _ in range(120):
        story.tick(1.0, alive=ALIVE[1:])
        story.send(story.outcome())
    assert len(story.jobs) == 2
    story.answer(RESULT)
    assert "tiers without an instance: nano, planned none" in story.plan.reason


def test_a_plan_that_still_fits_or_has_no_better_one_stays(story: PlannedStory) -> None:
    story.answer(RESULT)
    before = story.plan
    effects = story.answer(msgspec.structs.replace(RESULT, keep="as planned"))
    assert [effect.event for effect in effects if isinstance(effect, Log)] == ["cascade_plan_kept"]
    story.answer(PlanningResult(chosen=None, meets=False, reason="no plan serves the traffic"))
    assert story.plan == before


def test_a_planner_that_dies_leaves_the_plan_and_the_next_try_waits_longer_each_time(story: PlannedStory) -> None:
    before = story.plan
    gaps, last = [], story.now_ns
    for _ in range(3):
        effects = story.send(CascadePlanningFailed(key="c", detail="killed"))
        assert [effect.event for effect in effects if isinstance(effect, Log)] == ["cascade_planning_failed"]
        count = len(story.jobs)
        while len(story.jobs) == count:
            story.run(1)
        gaps.append(story.now_ns - last)
        last = story.now_ns
    assert story.plan == before
    assert gaps[0] < gaps[1] < gaps[2]


def test_a_result_for_a_coordinator_that_leads_no_more_is_dropped(story: PlannedStory) -> None:
    story.now_ns += 60 * S
    effects = story.answer(RESULT)
    assert not [effect for effect in effects if isinstance(effect, PutKey)]


def test_attempts_and_other_models_requests_are_not_the_cascades() -> None:
    story = PlannedStory()
    for _ in range(2 * REQUESTS_MIN):
        story.send(story.outcome("nano"))
    story.run(2, rate=0.1)
    assert story.jobs == []


def test_a_result_of_another_number_of_tiers_is_no_plan() -> None:
    plan = CascadePlan(cascade="c", epoch=1, tiers=[CascadeTier(model="nano")])
    assert planned(plan, RESULT, coordinator="x", why="y") is None


def _in_force() -> CascadePlan:
    return CascadePlan(cascade="c", epoch=1, tiers=[CascadeTier(model="nano"), CascadeTier(model="mini")], quality=50.0)


def test_a_day_of_stationary_traffic_gives_at_most_one_false_alarm() -> None:
    """Poisson arrivals of 0.7 a second, looked at every five minutes."""
    rng = Random(1)
    state = CascadeState(msgspec.structs.replace(CASCADE, period_s=300.0), plan=_in_force(), planned_ns=1)
    at_ns, alarms, looks = 0, [], 0
    while at_ns < 86_400 * S:
        at_ns += int(rng.expovariate(0.7) * S)
        state.finished.append(FinishedCall(at_ns, at_ns + S))
        if at_ns >= (looks + 1) * 300 * S:
            looks += 1
            alarms += filter(None, [why_plan(state, at_ns)])
    assert state.rate is not None
    assert looks > 200
    assert len(alarms) <= 1, alarms


@pytest.mark.parametrize(("rate", "longest_s"), [(40.0, 1.0), (4.0, 60.0)])
def test_requests_that_are_no_longer_kept_or_still_run_are_no_drop_of_the_rate(rate: float, longest_s: float) -> None:
    """At 40 a second less than the window is kept; with requests of a minute the last ones have not ended."""
    rng = Random(2)
    state = CascadeState(CASCADE, plan=_in_force(), planned_ns=1, rate=ArrivalRate(rate, 600.0))
    arrivals = [round(at * S / rate) for at in range(int(1500 * rate))]
    ends = sorted((at_ns + round(rng.uniform(0.01, 1.0) * longest_s * S), at_ns) for at_ns in arrivals)
    next_look = 120 * S
    for ended_ns, at_ns in ends:
        if ended_ns >= next_look:
            assert why_plan(state, next_look) == ""
            next_look += 60 * S
        state.finished.append(FinishedCall(at_ns, ended_ns))
    assert next_look > 1400 * S
