"""Moves of instances between the models of a cascade: one leaves at a time, over refusals, losses and new leaders."""

from __future__ import annotations

import msgspec
import pytest
from millrace.actor.effects import Effect, PutKey, Request
from millrace.cascade.jobs import FrontPoint, PlanningResult
from millrace.contracts.cascade import CascadeMove, CascadePlan, CascadeTier, ReplicaCount
from millrace.contracts.local import KeyChanged, Replied, RequestFailed, RequestFailure
from millrace.contracts.message import Body
from millrace.contracts.provisioner import (
    InstanceStarting,
    InstanceStopping,
    ProvisionRefusal,
    ProvisionRefused,
    StartInstance,
    StopInstance,
)

from services.coordinator.cascade_config import CoordinatedCascade, CoordinatedTier
from services.coordinator.cascade_moves import REFUSALS_MAX
from services.coordinator.cascade_planning import move_of
from services.coordinator.cascades import OPERATOR
from tests.unit.test_coordinator_cascades import Story

S = 1_000_000_000
MODELS = ("nano", "micro", "mini")
TIERS = [CoordinatedTier(model=model, threshold=60.0, instances_max=2) for model in MODELS]
CASCADE = CoordinatedCascade(name="c", tiers=TIERS, moves=True, move_limit_s=200.0)


class MovingStory(Story):
    """A coordinator, and a host with two devices that carries orders out after some seconds.

    Attributes:
        running: Model of each instance that serves.
        asked: Orders, in order.
        refuses: What the host answers in place of carrying out.
    """

    def __init__(
        self,
        cascade: CoordinatedCascade = CASCADE,
        *,
        name: str = "coordinator-0",
        running: dict[str, str] | None = None,
    ) -> None:
        self.asked: list[Request] = []
        self.running = dict(running or {"a": "nano", "b": "mini"})
        self.refuses: Body | None = None
        self.least = 2
        super().__init__(cascade, name=name)
        self.step()

    def send(self, body: Body) -> list[Effect]:
        effects = super().send(body)
        self.asked += [effect for effect in effects if isinstance(effect, Request)]
        return effects

    def step(self, seconds: int = 1) -> None:
        for _ in range(seconds):
            self.tick(1.0, alive=tuple(self.running.items()))

    def move(self, *instances: int, **fields: object) -> None:
        """An operator's plan with a move."""
        assert self.plan is not None
        given = {"before": self.counts(), "until_ns": self.now_ns + 200 * S, "thresholds": [10.0, 20.0, 0.0]} | fields
        move = CascadeMove(instances=list(instances), **given)  # type: ignore[arg-type]
        told = {"epoch": self.plan.epoch + 1, "move": move, "coordinator": OPERATOR}
        self.told("cascade", "c", msgspec.structs.replace(self.plan, **told))
        self.step()

    def carry_out(self, request: Request | None = None) -> str:
        """Do what an order says (the latest one if not given), and tell what it was."""
        request = request or self.asked[-1]
        body = request.body
        if isinstance(body, StopInstance):
            del self.running[body.instance]
            self.answer(InstanceStopping(instance=body.instance), request)
            self.send(KeyChanged(bucket="instance", key=body.instance, value=None, revision=0))
            done = f"stop {body.instance}"
        else:
            assert isinstance(body, StartInstance)
            name = f"{body.model}-{self.asked.index(request)}"
            self.answer(InstanceStarting(order=body.order, instance=name), request)
            self.running[name] = body.model
            done = f"start {body.model}"
        self.least = min(self.least, len(self.running))
        self.step()
        return done

    def answer(self, body: Body, request: Request | None = None) -> None:
        self.send(Replied(correlation=(request or self.asked[-1]).correlation, body=body))


def test_one_instance_stops_then_another_one_starts_and_the_thresholds_follow() -> None:
    story = MovingStory()
    story.move(0, 1, 1)
    assert [story.carry_out(), story.carry_out()] == ["stop a", "start micro"]
    assert story.plan is not None
    assert story.plan.move is None
    assert story.counts() == [0, 1, 1]
    assert [tier.threshold for tier in story.plan.tiers] == [10.0, 20.0, 0.0]
    assert "1 of micro" in story.plan.reason
    assert len(story.asked) == 2


JUDGED = msgspec.structs.replace(
    CASCADE, judge="llm", judge_tier=CoordinatedTier(model="verdict", instances=0, instances_max=2)
)


def test_a_judges_model_is_moved_as_a_tier_is() -> None:
    story = MovingStory(JUDGED, running={"a": "nano", "b": "mini", "c": "nano"})
    story.move(1, 0, 1, 1, before=[2, 0, 1, 0])
    assert [story.carry_out(), story.carry_out()] == ["stop c", "start verdict"]
    assert story.plan is not None
    assert story.plan.move is None
    assert story.plan.judge_tier is not None
    assert (story.counts(), story.plan.judge_tier.replicas[0].count) == ([1, 0, 1], 1)
    assert "1 of verdict" in story.plan.reason


def test_a_judge_leaves_where_the_last_instance_that_answers_must_not() -> None:
    story = MovingStory(JUDGED, running={"a": "nano", "v": "verdict"})
    story.move(0, 0, 1, 0, before=[1, 0, 0, 1])
    assert story.carry_out() == "stop v"
    assert story.carry_out() == "start mini"
    assert story.carry_out() == "stop a"
    assert story.counts() == [0, 0, 1]


def test_two_swaps_go_one_after_the_other_so_that_somebody_always_serves() -> None:
    story = MovingStory()
    story.move(0, 2, 0)
    done = [story.carry_out() for _ in range(4)]
    assert done == ["stop a", "start micro", "stop b", "start micro"]
    assert story.least == 1
    assert story.counts() == [0, 2, 0]


WIDE = [
    CoordinatedTier(model="nano", instances_max=4),
    CoordinatedTier(model="mini", tensor_parallel=2, instances_max=2),
]


def wide_story() -> MovingStory:
    """Two instances of two devices each, on a host with four; one is to become two of one device."""
    story = MovingStory(msgspec.structs.replace(CASCADE, tiers=WIDE), running={"a": "mini", "b": "mini"})
    story.move(2, 1, thresholds=[10.0, 0.0])
    return story


def test_all_that_fit_on_the_devices_of_one_that_left_start_together() -> None:
    story = wide_story()
    assert story.carry_out() == "stop b"
    starts = [each.body for each in story.asked[1:]]
    assert [type(body) for body in starts] == [StartInstance] * 2
    assert len({body.order for body in starts}) == 2  # type: ignore[attr-defined]
    assert [story.carry_out(request) for request in story.asked[1:]] == ["start nano"] * 2
    assert story.counts() == [2, 1]
    assert story.plan is not None
    assert story.plan.move is None
    assert len(story.asked) == 3


def test_the_next_instance_leaves_when_all_that_started_serve() -> None:
    story = MovingStory(msgspec.structs.replace(CASCADE, tiers=WIDE), running={"a": "mini", "b": "mini"})
    story.move(4, 0, thresholds=[10.0, 0.0])
    story.carry_out()
    first, second = story.asked[1:]
    story.carry_out(first)
    story.step(3)
    assert len(story.asked) == 3, "one of the two does not serve yet"
    story.carry_out(second)
    assert isinstance(story.asked[3].body, StopInstance)
    assert story.carry_out() == "stop a"
    assert [story.carry_out(request) for request in story.asked[4:]] == ["start nano"] * 2
    assert story.counts() == [4, 0]
    assert story.least == 1


def test_refusals_of_starts_that_were_asked_together_count_once() -> None:
    story = wide_story()
    story.carry_out()
    for _ in range(REFUSALS_MAX // 2 + 1):
        for request in story.asked[-2:]:
            story.send(
                Replied(correlation=request.correlation, body=ProvisionRefused(reason=ProvisionRefusal.NO_DEVICE))
            )
        story.step(2)
    assert story.plan is not None
    assert story.plan.move is not None
    assert story.plan.move.instances == [2, 1], "it was given up"


def test_one_refused_start_is_asked_again_beside_the_one_that_is_under_way() -> None:
    story = wide_story()
    story.carry_out()
    first, second = story.asked[1:]
    story.send(Replied(correlation=second.correlation, body=ProvisionRefused(reason=ProvisionRefusal.NO_DEVICE)))
    story.step(2)
    third = story.asked[-1]
    assert len(story.asked) == 4
    assert [story.carry_out(first), story.carry_out(third)] == ["start nano"] * 2
    assert story.counts() == [2, 1]


def test_a_move_given_up_ends_every_instance_that_was_started_and_does_not_serve() -> None:
    story = wide_story()
    story.carry_out()
    for number, request in enumerate(story.asked[1:]):
        story.send(
            Replied(correlation=request.correlation, body=InstanceStarting(order="o", instance=f"broken-{number}"))
        )
    story.step(200)
    ends = [each.body for each in story.asked if isinstance(each.body, StopInstance)][1:]
    assert [(body.instance, body.drain_limit_ms) for body in ends] == [("broken-0", 0), ("broken-1", 0)]


def test_nothing_else_is_ordered_while_an_order_is_open() -> None:
    story = MovingStory()
    story.move(0, 1, 1)
    story.step(5)
    assert len(story.asked) == 1
    story.answer(InstanceStopping(instance="a"))
    story.step(5)
    assert len(story.asked) == 1


def test_a_device_that_is_not_free_yet_is_asked_for_again() -> None:
    story = MovingStory()
    story.move(0, 1, 1)
    story.carry_out()
    for _ in range(3):
        story.answer(ProvisionRefused(reason=ProvisionRefusal.NO_DEVICE))
        story.step(2)
    assert [type(each.body) for each in story.asked] == [StopInstance, *[StartInstance] * 4]
    assert len({each.body.order for each in story.asked[1:]}) == 4  # type: ignore[attr-defined]
    story.carry_out()
    assert story.counts() == [0, 1, 1]


def test_an_order_that_nobody_answers_is_given_again() -> None:
    story = MovingStory()
    story.move(0, 1, 1)
    story.send(RequestFailed(correlation=story.asked[-1].correlation, reason=RequestFailure.TIMEOUT))
    story.step(2)
    assert [type(each.body) for each in story.asked] == [StopInstance, StopInstance]


def test_hosts_are_asked_in_turn() -> None:
    story = MovingStory(msgspec.structs.replace(CASCADE, hosts=["here", "there"]))
    story.move(0, 1, 1)
    story.answer(ProvisionRefused(reason=ProvisionRefusal.UNKNOWN_INSTANCE))
    assert [each.subject.split(".")[-2] for each in story.asked] == ["here", "there"]


@pytest.mark.parametrize("how", ["time", "refusals"])
def test_a_move_that_does_not_come_to_an_end_goes_back_once(how: str) -> None:
    story = MovingStory()
    story.move(0, 1, 1)
    story.carry_out()
    for _ in range(REFUSALS_MAX if how == "refusals" else 0):
        story.answer(ProvisionRefused(reason=ProvisionRefusal.AT_BOUND))
        story.step(2)
    if how == "time":
        story.answer(InstanceStarting(order="o", instance="broken"))
        story.step(200)
    assert story.plan is not None
    assert story.plan.move is not None
    assert (story.plan.move.instances, story.plan.move.before) == ([1, 0, 1], [])
    if how == "time":
        ends = [each.body for each in story.asked if isinstance(each.body, StopInstance)]
        assert [(body.instance, body.drain_limit_ms) for body in ends[1:]] == [("broken", 0)]
    story.step(2)
    story.asked = [each for each in story.asked if getattr(each.body, "instance", "") != "broken"]
    assert story.carry_out() == "start nano"
    assert story.plan.move is None
    assert story.counts() == [1, 0, 1]
    assert [tier.threshold for tier in story.plan.tiers] == [60.0] * 3


def test_a_move_back_that_fails_too_leaves_what_is_there() -> None:
    story = MovingStory()
    story.move(0, 1, 1)
    story.carry_out()
    story.step(500)
    assert story.plan is not None
    assert story.plan.move is None
    assert story.counts() == [0, 0, 1]


def test_the_last_instance_that_serves_is_never_stopped() -> None:
    story = MovingStory()
    story.move(0, 1, 1)
    del story.running["b"]
    story.step(5)
    stops = [each for each in story.asked if isinstance(each.body, StopInstance)]
    assert len(stops) <= 1
    story = MovingStory()
    del story.running["b"]
    story.step(5)
    story.move(0, 1, 1)
    assert not [each for each in story.asked if isinstance(each.body, StopInstance)]


def test_whoever_takes_the_lease_over_goes_on() -> None:
    story = MovingStory()
    story.move(0, 1, 1)
    story.carry_out()
    successor = MovingStory(name="coordinator-1")
    successor.running = dict(story.running)
    successor.send(KeyChanged(bucket="instance", key="a", value=None, revision=0))
    held = story.keys["cascade", "c"][0]
    successor.told("cascade", "c", held)
    successor.step(5)
    assert successor.carry_out() == "start micro"
    assert successor.plan is not None
    assert successor.plan.move is None
    assert successor.counts() == [0, 1, 1]


def test_without_a_pool_of_devices_a_move_is_dropped() -> None:
    story = MovingStory(msgspec.structs.replace(CASCADE, moves=False))
    story.move(0, 1, 1)
    assert story.plan is not None
    assert story.plan.move is None
    assert "no pool" in story.plan.reason
    assert story.asked == []


RESULT = PlanningResult(
    chosen=None,
    meets=True,
    reason="r",
    move=FrontPoint(
        thresholds=[1.0, 2.0], instances=[0, 1, 1], shares=[0.0, 1.0, 0.4], quality=50.0, quality_low=48.0, p95_s=1.0
    ),
)


def _plan(*counts: int) -> CascadePlan:
    one = ReplicaCount(tensor_parallel=1, pipeline_parallel=1, count=1)
    tiers = [CascadeTier(model=model, replicas=[one] * count) for model, count in zip(MODELS, counts, strict=True)]
    return CascadePlan(cascade="c", epoch=1, tiers=tiers)


def test_a_result_becomes_a_move_only_where_it_can_be_carried_out() -> None:
    move = move_of(CASCADE, _plan(1, 0, 1), RESULT, 5 * S)
    assert move is not None
    assert (move.instances, move.before, move.until_ns) == ([0, 1, 1], [1, 0, 1], 205 * S)
    assert (move.thresholds, move.p95_ns) == ([1.0, 2.0, 0.0], S)
    assert move_of(msgspec.structs.replace(CASCADE, moves=False), _plan(1, 0, 1), RESULT, 0) is None
    assert move_of(CASCADE, _plan(0, 0, 1), RESULT, 0) is None
    assert move_of(CASCADE, msgspec.structs.replace(_plan(1, 0, 1), move=move), RESULT, 0) is None
    full = [msgspec.structs.replace(tier, instances_max=int(tier.model != "micro")) for tier in TIERS]
    few = [msgspec.structs.replace(tier, instances_max=1) for tier in full]
    assert move_of(msgspec.structs.replace(CASCADE, tiers=few), _plan(1, 0, 1), RESULT, 0) is not None
    two = msgspec.structs.replace(RESULT, move=msgspec.structs.replace(RESULT.move, instances=[0, 2, 0]))
    assert move_of(msgspec.structs.replace(CASCADE, tiers=few), _plan(1, 0, 1), two, 0) is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"instances": [1, 1]}, "instances has 2 entries"),
        ({"instances": [0, 0, 0]}, "one tier needs one"),
        ({"instances": [-1, 1, 1]}, "negative"),
        ({"instances": [1, 1, 1], "thresholds": [0.0, 101.0, 0.0]}, "threshold 101"),
    ],
)
def test_a_move_that_cannot_be_is_refused(fields: dict[str, list[float]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        msgspec.structs.replace(_plan(1, 1, 1), move=CascadeMove(until_ns=1, **fields))  # type: ignore[arg-type]


def test_a_plan_is_written_over_the_revision_that_was_seen() -> None:
    story = MovingStory()
    story.move(0, 1, 1)
    story.carry_out()
    writes = [effect for effect in story.send(story.keys["cascade", "c"][0]) if isinstance(effect, PutKey)]
    assert writes == []
