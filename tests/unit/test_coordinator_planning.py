"""The coordinator's planning: lengths come in as outcomes, plans with stages go out, membership stays sticky."""

import random

import msgspec
import pytest
from millrace.actor.deps import ActorDeps
from millrace.actor.effects import Log, Publish, Subscribe
from millrace.actor.errors import ConfigError
from millrace.actor.group import ActorGroup
from millrace.contracts.coordinator import PlanProposed
from millrace.contracts.local import KeyChanged, TimerFired
from millrace.contracts.message import Body, Message
from millrace.contracts.observers import RequestFinished
from millrace.contracts.plan import Lease, Plan
from millrace.contracts.status import InstanceRecord
from millrace.enginemodel.coefficients import load_step_time
from millrace.policies.stages.fixed.policy import FixedRange

from services.coordinator.build import build
from services.coordinator.config import CoordinatorConfig, StagesConfig
from services.coordinator.instance_models import InstanceModels
from services.coordinator.plan_writing import PlanWriting
from services.coordinator.stages import StagesActor
from tests.testbed.messages import decision, plain, plain_record, plain_summary

S = 1_000_000_000
MODEL = "llama"
SET = "h200-llama-3-8b"


def record(name: str, *, step_time: str = SET) -> InstanceRecord:
    bounds = {"max_model_len": 131_072, "max_sequences": 1024, "token_budget": 8192, "blocks_total": 56_250}
    return plain_record(name, model=MODEL, step_time=step_time, **bounds)


def fleet(count: int) -> list[InstanceRecord]:
    return [record(f"w{index:02}") for index in range(count)]


class Story:
    """Stages that are led, and the plan that was written last."""

    def __init__(self, count: int = 16, **config: object) -> None:
        fields = {"policy": "exact", "period_s": 10.0, "parameters": {"requests_min": 100}} | config
        settings = CoordinatorConfig(name="c0", stages=msgspec.convert(fields, StagesConfig))
        costs = InstanceModels({SET: load_step_time(SET)})
        self.stages = StagesActor(settings, incarnation=1, instance_model=costs.of)
        self.writing = PlanWriting(settings)
        self.records = fleet(count)
        self.plan: Plan | None = None
        self.now_ns = 1_000 * S
        self.logs: list[str] = []
        self.known: set[str] = set()
        self.stages.start(self.now_ns)
        self.register()
        self.lead("c0")
        self.write()

    def send(self, body: Body, at_ns: int | None = None) -> None:
        for effect in self.stages.handle(Message(body), self.now_ns if at_ns is None else at_ns):
            if isinstance(effect, Publish) and isinstance(effect.body, PlanProposed):
                self.writing.take(effect.body)
            if isinstance(effect, Log):
                self.logs.append(str(effect.fields["reason"]))
        self.stages.check_invariants()

    def lead(self, holder: str) -> None:
        lease = Lease(model=MODEL, holder=holder, incarnation=1, until_ns=self.now_ns + 10_000_000 * S)
        self.send(KeyChanged(bucket="lease", key=MODEL, value=lease, revision=1))

    def register(self) -> None:
        present = {each.instance: each for each in self.records}
        for name in self.known - set(present):
            self.send(KeyChanged(bucket="instance", key=name, value=None, revision=1))
        for name, value in present.items():
            self.send(KeyChanged(bucket="instance", key=name, value=value, revision=1))
        self.known = set(present)

    def tick(self, seconds: float = 10.0) -> Plan:
        self.now_ns += round(seconds * S)
        self.register()
        self.send(TimerFired(name="tick"))
        return self.write()

    def write(self) -> Plan:
        after = self.writing.next_plan(MODEL, self.plan, self.records)
        assert after is None or self.plan is None or after.epoch == self.plan.epoch + 1
        self.plan = after or self.plan
        self.writing.check()
        if after is not None:
            self.send(KeyChanged(bucket="plan", key=MODEL, value=after, revision=after.epoch))
        return self.plan

    def place(self, request: str, prompt: int, *, at_ns: int) -> None:
        self.send(decision(request, model=MODEL, prompt_tokens=prompt, max_tokens=100_000), at_ns)

    def end(self, request: str, outputs: list[int]) -> None:
        self.send(plain(RequestFinished, request=request, model=MODEL, prompt_tokens=9, output_tokens=outputs))

    def hear(self, count: int, rate: float) -> None:
        """Requests that arrive evenly up to now and have ended."""
        rng = random.Random(7)
        for index in range(count):
            request = f"{self.now_ns}/r{index}"
            prompt = max(1, round(rng.lognormvariate(5.7, 1.0)))
            self.place(request, prompt, at_ns=self.now_ns - round((count - index) / rate * S))
            self.end(request, [max(1, min(60_000, round(rng.lognormvariate(6.8, 1.3))))])

    def members(self) -> dict[str, str]:
        return {name: stage.name for stage in self.plan.stages for name in stage.instances}


@pytest.fixture
def story() -> Story:
    """One with a plan of one stage, and lengths that a period from now bring several."""
    story = Story()
    story.tick()
    story.hear(3000, 20.0)
    return story


def test_without_outcomes_of_late_there_is_one_stage() -> None:
    story = Story()
    plan = story.tick()
    assert [len(stage.instances) for stage in plan.stages] == [16]
    assert (plan.epoch, plan.boundary_epoch, plan.policy) == (1, 1, "one_stage")
    story.tick()
    assert story.plan is plan
    story = Story(window_s=60.0)
    story.tick()
    story.hear(3000, 20.0)
    assert len(story.tick(120.0).stages) == 1, "old requests say nothing"


def test_lengths_under_load_bring_stages_once_a_period_with_what_they_expect(story: Story) -> None:
    assert len(story.tick(9.0).stages) == 1
    plan = story.tick(1.0)
    assert len(plan.stages) > 1
    assert all(len(stage.instances) == stage.instances_wanted for stage in plan.stages)
    assert plan.boundary_epoch == plan.epoch == 2
    assert plan.expects.cost < plan.expects.one_stage_cost
    assert len(plan.expects.stages) == len(plan.stages)
    assert "better than one stage" in plan.reason
    story.tick()
    assert story.plan is plan  # the same lengths


def test_a_steady_load_of_long_requests_is_planned_while_most_still_run() -> None:
    """From an empty cluster, a minute at 40 ms per token: nobody has generated more than 1,500 tokens of 60,000."""
    story = Story(parameters={"requests_min": 200, "margin": 0.02, "change_margin": 0.02}, period_s=30.0)
    story.tick(1.0)
    rng, running, produced = random.Random(5), {}, 0  # type: random.Random, dict[str, list[int]], int
    for second in range(61):
        story.now_ns += S
        for index in range(18):
            request, output = f"r{second}/{index}", max(1, min(60_000, round(rng.lognormvariate(6.8, 1.3))))
            story.place(request, round(rng.lognormvariate(5.7, 1.0)), at_ns=story.now_ns)
            running[request] = [0, output]
        for request, lengths in list(running.items()):
            made = min(25, lengths[1] - lengths[0])
            lengths[0], produced = lengths[0] + made, produced + made
            if lengths[0] == lengths[1]:
                story.end(request, [lengths[1]])
                del running[request]
        load = {"running": len(running), "output_tokens_total": produced, "blocks_free": 0, "blocks_total": 0}
        story.send(plain_summary("w00", model=MODEL, **load))
        story.tick(0.0)
    assert len(story.plan.stages) > 1, story.logs
    expects = story.plan.expects
    assert expects.requests_per_s == pytest.approx(18.0, rel=0.1)


def test_a_join_or_a_leave_moves_nobody_else_and_keeps_the_boundaries(story: Story) -> None:
    before = story.tick()
    members = story.members()
    gone = story.records.pop(4)
    plan = story.write()
    assert plan.cuts == before.cuts
    assert plan.boundary_epoch == before.boundary_epoch
    assert story.members() == {name: stage for name, stage in members.items() if name != gone.instance}
    assert plan.reason == "w04 left"
    story.records.append(record("new"))
    story.write()
    story.records.append(gone)
    story.write()
    assert {**story.members(), "new": ""} == {**members, "new": ""}


def test_an_unknown_step_time_changes_nothing(story: Story) -> None:
    story.records[3] = record("w03", step_time="nobody-knows")
    assert len(story.tick().stages) == 1
    assert "no step-time model" in story.logs[-1]


def test_a_model_that_is_not_led_is_forgotten(story: Story) -> None:
    story.lead("another")
    story.hear(3000, 20.0)
    assert story.stages.snapshot() == {"planning": {}}


def test_what_is_placed_again_counts_once() -> None:
    story = Story()
    story.tick()
    for _ in range(2):
        story.place("r", 100, at_ns=story.now_ns)
    assert story.stages.snapshot()["planning"][MODEL]["requests"] == 1


RANGES = [FixedRange(length_min=0, length_max=1024, instances=3), FixedRange(length_min=1024, members=("w00", "w1*"))]


def test_fixed_ranges_of_a_model_hold_whatever_the_policy_is() -> None:
    story = Story(4, ranges={MODEL: msgspec.to_builtins(RANGES)})
    plan = story.write()
    assert plan.cuts == [1024]
    assert plan.policy == "fixed"
    assert story.members() == {"w00": "s1", "w01": "s0", "w02": "s0", "w03": "s0"}
    story.records.append(record("w10"))
    story.records.append(record("other"))
    story.write()
    assert story.members()["w10"] == "s1"


TIERS = [{"model": "nano", "judge": "j"}, {"model": "mini"}]
TARGET = {"quality": 50.0, "sample": "s.jsonl"}


@pytest.mark.parametrize(
    ("config", "heard"),
    [
        ({"stages": {"policy": "one_stage"}}, set()),
        ({"stages": {"policy": "exact"}}, {"decision", "outcome"}),
        ({"step_bounds": {"tpot_s": 0.05}}, {"decision", "outcome"}),
        ({"cascades": [{"name": "c", "tiers": TIERS}]}, set()),
        ({"cascades": [{"name": "c", "tiers": TIERS, **TARGET}]}, {"outcome"}),
    ],
)
def test_requests_are_listened_to_where_something_learns_from_them(config: dict[str, object], heard: set[str]) -> None:
    effects = _built(msgspec.convert(config, CoordinatorConfig)).start(0)
    subjects = [effect.subject for effect in effects if isinstance(effect, Subscribe)]
    kinds = [kind for subject in subjects if (kind := subject.split(".")[2]) in ("decision", "outcome")]
    assert sorted(kinds) == sorted(heard)


def _built(config: CoordinatorConfig) -> ActorGroup:
    return build(config, ActorDeps(incarnation=1, rng=random.Random(1)))


def cascaded(*tiers: dict[str, object], **fields: object) -> list[dict[str, object]]:
    return [{"name": "c", "tiers": list(tiers), **fields}]


NANO, RELIEF = {"model": "nano"}, {"strategy": "relief"}


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("stages", {"policy": "best"}, "stages.policy: 'best' is none of exact, fixed, one_stage"),
        ("stages", {"policy": "exact", "parameters": {"margin": 2}}, "stages.parameters of exact: .*margin"),
        ("stages", {"step_times": {"x": "/nowhere/x.toml"}}, "stages.step_times: .*nowhere"),
        ("stages", {"ranges": {"m": [{"length_min": 5}]}}, r"ranges.m: ranges\[0\].length_min is 5"),
        ("flips", {"policy": "astrology"}, "flips"),
        ("flips", {"policy": "fixed", "parameters": {"x": 1}}, "flips"),
        ("provisioning", {"strategy": "pre-empt"}, "one of none, preempt, relief"),
        ("provisioning", RELIEF | {"parameters": {"threshold_s": -3}}, "threshold_s"),
        ("provisioning", RELIEF | {"hosts": []}, "hosts is empty"),
        ("cascades", cascaded(NANO | {"threshold": 101}), "threshold 101"),
        ("cascades", cascaded(NANO, NANO), "tiers of c"),
        ("cascades", cascaded(NANO, quality=50.0), "needs sample"),
        ("cascades", cascaded(NANO, quality=50.0, latency_s=1.0, sample="s"), "exclude each other"),
    ],
)
def test_a_wrong_configuration_is_refused_by_name(key: str, value: object, named: str) -> None:
    with pytest.raises((ConfigError, msgspec.ValidationError), match=named):
        _built(msgspec.convert({key: value}, CoordinatorConfig))
