"""Flips of roles: through BOTH, with nothing on its way, not twice in a row, and never past the capable minimum."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from millrace.actor.effects import Reply
from millrace.contracts.coordinator import OrderAccepted, OrderRefusal, OrderRefused, SetRole
from millrace.contracts.local import BucketReady, BusReconnected, KeyChanged, KeyFailure, KeyNotPut, TimerFired
from millrace.contracts.message import Message
from millrace.contracts.plan import InstanceRole, Lease
from millrace.contracts.status import InstanceMigrations, InstanceSummary, LoadIndicators, PhaseQueues, ServicePresence
from millrace.policies.roles import RoleInstance, RolesView, may_take_role

from services.coordinator.config import RolePolicyConfig
from services.coordinator.roles import APART_NS, HOP_NS
from tests.unit.coordinator_bench import MODEL, Bench, S, summary, timers

BOTH, PREFILL, DECODE = InstanceRole
ROLES = {"p*": PREFILL, "d*": DECODE}


class Story(Bench):
    """A coordinator of four instances; their summaries are repeated with each tick."""

    def __init__(
        self,
        *names: str,
        roles: Mapping[str, InstanceRole] = ROLES,
        config: RolePolicyConfig | None = None,
        incarnation: int = 1,
    ) -> None:
        self.moving: dict[str, int] = {}
        self.loads: dict[str, LoadIndicators] = {}
        names = names or ("p0", "p1", "d0", "d1")
        super().__init__(*names, incarnation=incarnation, roles=roles, flips=config or RolePolicyConfig())

    def tick(self, seconds: float = 1.0) -> list[object]:
        for name in self.registered:
            self.send(loaded(name, self.now_ns, self.loads.get(name, LoadIndicators())))
        told = [InstanceMigrations(name, count) for name, count in self.moving.items()]
        self.send(ServicePresence(role="migrator", name="m", incarnation=1, at_ns=self.now_ns, moving=told))
        return list(super().tick(seconds))

    def until(self, seconds: int) -> None:
        for _ in range(seconds):
            self.tick()

    @property
    def roles(self) -> dict[str, InstanceRole]:
        return {n: s.roles.get(n, BOTH) for s in self.plan.stages for n in s.instances}

    def order(self, instance: str, role: InstanceRole, epoch: int = 0) -> OrderAccepted | OrderRefused:
        body = SetRole(model=MODEL, instance=instance, role=role, plan_epoch=epoch)
        effects = self.take(self.actor.handle(Message(body, reply_to="_INBOX.operator.1"), self.now_ns))
        (answer,) = [effect.body for effect in effects if isinstance(effect, Reply)]
        return answer

    def counts(self) -> dict[str, int]:
        return self.actor.snapshot()["roles"][MODEL]["counts"]


def loaded(name: str, at_ns: int, load: LoadIndicators) -> InstanceSummary:
    return msgspec.structs.replace(summary(name), at_ns=at_ns, indicators=load)


ORDERED = RolePolicyConfig(policy="fixed", gap_s=3.0, settle_s=1.0, drain_s=4.0)


@pytest.fixture
def story() -> Story:
    return Story(config=ORDERED)


def test_the_last_hop_waits_for_moves_under_way_and_leases_that_only_the_worker_tells(story: Story) -> None:
    story.order("p0", DECODE)
    story.moving = {"p0": 1}
    story.until(10)
    assert story.roles["p0"] is BOTH
    story.moving, story.loads = {}, {"p0": LoadIndicators(PhaseQueues(moving=2))}
    story.until(6)
    assert story.roles["p0"] is BOTH
    story.loads = {}
    story.until(1)
    assert story.roles["p0"] is DECODE


def test_decodes_may_end_before_the_last_hop_to_prefill(story: Story) -> None:
    story.loads = {"d0": LoadIndicators(decode=PhaseQueues(running=9))}
    story.order("d0", PREFILL)
    story.until(4)
    assert story.roles["d0"] is BOTH
    story.until(2)
    assert story.roles["d0"] is PREFILL


def test_who_keeps_arriving_holds_no_flip_to_decode_and_one_to_prefill_no_longer_than_decodes_do() -> None:
    """Under load a hand-off is on its way to whoever decodes at all times."""
    arriving = LoadIndicators(decode=PhaseQueues(moving=3))
    story = Story(config=ORDERED)
    story.loads = {"p0": arriving, "d0": arriving}
    story.order("p0", DECODE)
    story.until(3)
    assert story.roles["p0"] is DECODE
    story.order("d0", PREFILL)
    story.until(7)
    assert story.roles["d0"] is BOTH
    story.until(2)
    assert story.roles["d0"] is PREFILL
    assert story.counts() == {"begun": 2, "done": 2}


def test_nobody_is_flipped_twice_within_the_gap(story: Story) -> None:
    story.order("d0", BOTH)
    story.tick()
    story.order("d0", DECODE)
    story.until(2)
    assert story.roles["d0"] is BOTH
    story.until(4)
    assert story.roles["d0"] is DECODE


def test_the_last_hop_waits_until_the_plan_says_both(story: Story) -> None:
    story.order("d0", PREFILL)
    for _ in range(6):  # the store takes nothing
        story.now_ns += S
        for name in timers(story.actor):
            story.actor.handle(Message(TimerFired(name=name)), story.now_ns)
    assert story.roles["d0"] is DECODE
    story.send(KeyNotPut(correlation=f"plan/{MODEL}", reason=KeyFailure.CONFLICT))
    story.tick()
    assert story.roles["d0"] is BOTH


def test_whoever_is_left_does_both_where_a_phase_has_lost_everybody() -> None:
    story = Story("p0", "d0", "d1")
    story.send(KeyChanged(bucket="instance", key="p0", value=None, revision=0))
    assert story.roles == {"d0": BOTH, "d1": DECODE}
    story.register("p0")
    assert story.roles == {"p0": PREFILL, "d0": DECODE, "d1": DECODE}


def test_a_new_leader_brings_roles_of_the_plan_to_other_configured_ones_through_both(story: Story) -> None:
    other = successor_of(story, ORDERED, roles={"p0": PREFILL, "*": DECODE})
    assert other.roles == {"p0": PREFILL, "p1": PREFILL, "d0": DECODE, "d1": DECODE}
    other.until(4)
    assert other.roles["p1"] is BOTH
    other.until(4)
    assert other.roles["p1"] is DECODE


def test_a_policy_of_ones_own_flips_but_not_just_after_instances_came(tmp_path: Path) -> None:
    (tmp_path / "helping.py").write_text(
        "from millrace.contracts.plan import InstanceRole\n"
        "from millrace.policies.roles import Flip, RoleDecision\n"
        "def decide(view, parameters, state, now_ns):\n"
        "    able = [i for i in view.instances if i.name == 'd0' and i.movable and i.summaries]\n"
        "    flips = tuple(Flip(i.name, InstanceRole.BOTH) for i in able if i.role is InstanceRole.DECODE)\n"
        "    return RoleDecision(flips=flips, reason='helps'), state\n"
    )
    story = Story(config=RolePolicyConfig(policy=str(tmp_path / "helping.py")))
    story.until(APART_NS // S - 2)
    assert story.roles["d0"] is DECODE
    story.until(4)
    assert story.roles["d0"] is BOTH
    assert story.counts() == {"begun": 1, "done": 1}


def test_a_stage_keeps_who_prefills_and_who_decodes() -> None:
    instances = tuple(RoleInstance(name=name, role=role, home=role) for name, role in (("a", PREFILL), ("b", DECODE)))
    view = RolesView(model=MODEL, stage="s0", instances=instances)
    taken = [may_take_role(view, *each) for each in (("a", DECODE), ("b", PREFILL), ("a", BOTH))]
    assert taken == [False, False, True]


# orders


def test_orders_that_make_no_sense_are_refused_with_their_reason() -> None:
    story = Story("p0", "d0", config=ORDERED)
    for instance, role, epoch, reason in (
        ("nobody", BOTH, 0, OrderRefusal.UNKNOWN_INSTANCE),
        ("p0", DECODE, 0, OrderRefusal.NOT_CAPABLE),
        ("d0", PREFILL, 0, OrderRefusal.NOT_CAPABLE),
        ("d0", BOTH, story.plan.epoch - 1, OrderRefusal.OLD_PLAN),
    ):
        answer = story.order(instance, role, epoch)
        assert answer.reason is reason
        assert answer.detail
    story.until(5)
    assert story.roles == {"p0": PREFILL, "d0": DECODE}
    story.register("d1")
    assert isinstance(story.order("d0", PREFILL), OrderAccepted)
    answer = story.order("d1", PREFILL)
    assert answer.reason is OrderRefusal.NOT_CAPABLE


def successor_of(story: Story, config: RolePolicyConfig, roles: Mapping[str, InstanceRole] = ROLES) -> Story:
    """Another coordinator that finds what the first one wrote."""
    other = Story.__new__(Story)
    other.moving, other.loads = {}, {}
    Bench.__init__(other, incarnation=2, roles=roles, flips=config)
    other.keys, other.revision, other.now_ns = story.keys, story.revision, story.now_ns
    for (bucket, key), (value, revision) in list(story.keys.items()):
        other.send(KeyChanged(bucket=bucket, key=key, value=value, revision=revision))
    for name in ("p0", "p1", "d0", "d1"):
        other.register(name)
    return other


def test_an_order_that_waits_says_for_what(story: Story) -> None:
    story.order("d0", PREFILL)
    story.tick()
    answer = story.order("d1", BOTH)
    assert isinstance(answer, OrderAccepted)
    assert answer.detail == "d1 will be both, not yet: d0 is on its way to prefill"
    story.tick()
    assert story.actor.snapshot()["roles"][MODEL]["ordered"] == {"d0": "prefill", "d1": "both"}
    story.until(8)
    told = story.actor.snapshot()["roles"][MODEL]
    assert (told["ordered"], told["counts"]["done"]) == ({}, 2)
    assert "ordered by an operator" in told["last"]


def test_an_order_whose_flip_was_given_up_is_tried_again(story: Story) -> None:
    story.moving = {"p0": 1}
    story.order("p0", DECODE)
    story.until(HOP_NS // S + 2)
    assert story.roles["p0"] is BOTH
    assert story.counts()["given_up"] == 1
    story.moving = {}
    story.until(8)
    assert story.roles["p0"] is DECODE


@pytest.mark.parametrize(("seconds", "role"), [(1, BOTH), (5, PREFILL)])
def test_orders_stand_in_the_plan_and_outlive_their_coordinator(story: Story, seconds: int, role: InstanceRole) -> None:
    story.order("d0", PREFILL)
    story.until(seconds)
    assert (story.plan.role_orders, story.roles["d0"]) == ({"d0": PREFILL}, role)
    other = successor_of(story, ORDERED)
    assert other.roles["d0"] is role
    other.until(6)
    assert other.roles == {"p0": PREFILL, "p1": PREFILL, "d0": PREFILL, "d1": DECODE}
    assert ("begun" in other.counts()) == (role is BOTH)


def test_a_new_leader_begins_no_flip_at_once(story: Story) -> None:
    story.order("d0", BOTH)
    story.tick()
    other = successor_of(story, ORDERED)
    answer = other.order("d1", BOTH)
    assert isinstance(answer, OrderAccepted)
    assert "not yet" in answer.detail


def lose_disk(bench: Bench, *, told: bool) -> None:
    """The server comes back with empty buckets. ``told``: whether the watch says that the keys are gone."""
    bench.keys.clear()
    bench.send(BusReconnected())
    for bucket in ("plan", "lease") if told else ():
        bench.send(KeyChanged(bucket=bucket, key=MODEL, value=None, revision=9))
    for bucket in ("instance", "plan", "lease"):
        bench.send(BucketReady(bucket=bucket))


@pytest.mark.parametrize("told", [True, False])
def test_a_store_that_loses_its_disk_gets_the_plan_again_from_its_leader(story: Story, told: bool) -> None:
    assert isinstance(story.order("d0", PREFILL), OrderAccepted)
    story.until(8)
    before = story.plan
    lose_disk(story, told=told)
    story.until(2)
    assert story.plan.epoch > before.epoch
    assert (story.plan.stages, story.plan.role_orders) == (before.stages, {"d0": PREFILL})


def test_a_standby_that_leads_after_the_store_lost_its_disk_keeps_roles_and_orders(story: Story) -> None:
    assert isinstance(story.order("d0", PREFILL), OrderAccepted)
    story.until(8)
    before = story.plan
    standby = Bench(name="coordinator-1", roles=ROLES, flips=ORDERED)
    standby.now_ns = story.now_ns
    lease = Lease(model=MODEL, holder="coordinator-0", incarnation=1, until_ns=story.now_ns + 10 * S)
    standby.send(KeyChanged(bucket="lease", key=MODEL, value=lease, revision=9))
    standby.send(KeyChanged(bucket="plan", key=MODEL, value=before, revision=9))
    for name in ("d0", "d1", "p0", "p1"):
        standby.register(name)
        standby.send(summary(name))
    lose_disk(standby, told=True)
    standby.all_report()
    standby.tick()
    assert standby.plan.coordinator == "coordinator-1"
    assert standby.plan.epoch > before.epoch
    assert (standby.plan.stages, standby.plan.role_orders) == (before.stages, {"d0": PREFILL})
