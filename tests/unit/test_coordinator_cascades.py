"""Plans of cascades: leases, thresholds in force, membership of tiers, and what other writers do."""

import msgspec
import pytest
from millrace.actor.effects import DeleteKey
from millrace.contracts.cascade import CascadePlan, CascadeTier
from millrace.contracts.local import BucketReady, BusReconnected, KeyChanged, KeyUnreadable, StopRequested
from millrace.contracts.plan import Lease

from services.coordinator.cascade_config import CoordinatedCascade, CoordinatedTier
from services.coordinator.cascades import OPERATOR
from tests.testbed.messages import plain_record
from tests.unit.coordinator_bench import Bench, summary

S = 1_000_000_000
TIERS = [CoordinatedTier(model="nano", threshold=60.0), CoordinatedTier(model="mini", threshold=0.0)]
CASCADE = CoordinatedCascade(name="c", tiers=TIERS)
BUCKETS = ("instance", "plan", "lease", "cascade", "cascade_lease")


class Story(Bench):
    buckets = BUCKETS

    def __init__(self, cascade: CoordinatedCascade = CASCADE, *, name: str = "coordinator-0") -> None:
        super().__init__(name=name, cascades=[cascade])

    def register(self, name: str, model: str) -> None:
        record = plain_record(name, incarnation=5, model=model, blocks_total=256)
        self.send(KeyChanged(bucket="instance", key=name, value=record, revision=1))

    def tick(self, seconds: float = 1.0, *, alive: tuple[tuple[str, str], ...] = ()) -> None:
        self.now_ns += int(seconds * S)
        for name, model in alive:
            self.register(name, model)
            self.send(msgspec.structs.replace(summary(name), model=model, at_ns=self.now_ns))
        super().tick(0)

    @property
    def plan(self) -> CascadePlan | None:
        held = self.keys.get(("cascade", "c"))
        return held[0] if held else None

    def counts(self) -> list[int]:
        return [tier.instances for tier in self.plan.tiers]


def _thresholds(plan: CascadePlan | None) -> list[float]:
    return [tier.threshold for tier in plan.tiers]


@pytest.fixture
def story() -> Story:
    return Story()


def test_configured_thresholds_are_planned_as_soon_as_an_instance_is_there(story: Story) -> None:
    story.tick()
    assert story.plan is None
    story.register("w0", "nano")
    assert (story.plan.cascade, story.plan.epoch, story.plan.judge) == ("c", 1, "confidence")
    assert _thresholds(story.plan) == [60.0, 0.0]
    assert story.counts() == [1, 0]
    assert "configured" in story.plan.reason
    before = story.revision
    for _ in range(3):
        story.tick(0.5, alive=(("w0", "nano"),))
    assert story.revision == before


@pytest.mark.parametrize("expected", [1, 0])
def test_membership_follows_at_once_and_a_tier_is_awaited_unless_it_begins_empty(expected: int) -> None:
    nano, mini = CASCADE.tiers
    story = Story(msgspec.structs.replace(CASCADE, tiers=[nano, msgspec.structs.replace(mini, instances=expected)]))
    story.register("w0", "nano")
    assert [tier.awaited for tier in story.plan.tiers] == [False, expected == 1]
    story.register("w1", "mini")
    assert (story.counts(), story.plan.epoch) == ([1, 1], 2)
    assert [tier.awaited for tier in story.plan.tiers] == [False, False]
    assert "mini: 1 instance, had 0" in story.plan.reason
    for _ in range(5):
        story.tick(alive=(("w1", "mini"),))
    assert story.counts() == [0, 1]
    assert [tier.awaited for tier in story.plan.tiers] == [True, False]
    assert _thresholds(story.plan) == [60.0, 0.0]


def test_a_plan_that_a_person_put_stays_and_only_its_instances_follow(story: Story) -> None:
    story.register("w0", "nano")
    tiers = [CascadeTier(model="nano", threshold=33.0), CascadeTier(model="mini", threshold=0.0)]
    told = CascadePlan(cascade="c", epoch=2, tiers=tiers, coordinator=OPERATOR, quality=51.0, reason="by hand")
    story.told("cascade", "c", told)
    assert _thresholds(story.plan) == [33.0, 0.0]
    assert story.counts() == [1, 0]
    assert (story.plan.epoch, story.plan.coordinator, story.plan.quality) == (3, OPERATOR, 51.0)


def test_a_plan_of_other_thresholds_or_tiers_left_in_the_store_gives_way_to_the_configuration() -> None:
    for models in (("nano", "mini"), ("mini", "nano"), ("nano", "huge")):
        story = Story()
        tiers = [CascadeTier(model=models[0], threshold=10.0), CascadeTier(model=models[1])]
        story.told("cascade", "c", CascadePlan(cascade="c", epoch=7, tiers=tiers, coordinator="coordinator-9"))
        story.register("w0", "nano")
        assert _thresholds(story.plan) == [60.0, 0.0]
        assert story.plan.epoch == 8


def test_a_reconnect_writes_nothing_until_the_store_has_its_keys_and_the_end_frees_the_lease(story: Story) -> None:
    story.register("w0", "nano")
    story.send(BusReconnected())
    before = story.revision
    story.register("w1", "mini")
    story.tick(0.5, alive=(("w0", "nano"), ("w1", "mini")))
    assert story.revision == before
    for bucket in BUCKETS:
        for (name, key), (value, revision) in list(story.keys.items()):
            if name == bucket:
                story.send(KeyChanged(bucket=bucket, key=key, value=value, revision=revision))
        story.send(BucketReady(bucket=bucket))
    assert story.counts() == [1, 1]
    assert DeleteKey(bucket="cascade_lease", key="c", correlation="4|release/c") in story.send(StopRequested())


def test_what_is_no_plan_and_cascades_of_others_change_nothing(story: Story) -> None:
    lease = Lease(model="c", holder="x", incarnation=1, until_ns=1)
    assert story.send(KeyChanged(bucket="cascade", key="c", value=lease, revision=5))
    other = CascadePlan(cascade="d", epoch=1, tiers=[CascadeTier(model="nano")])
    assert story.send(KeyChanged(bucket="cascade", key="d", value=other, revision=6)) == []


def test_a_plan_that_cannot_be_read_is_written_anew_with_what_a_person_put(story: Story) -> None:
    story.register("w0", "nano")
    tiers = [CascadeTier(model="nano", threshold=33.0), CascadeTier(model="mini")]
    story.told("cascade", "c", CascadePlan(cascade="c", epoch=2, tiers=tiers, coordinator=OPERATOR))
    story.revision += 1
    story.keys["cascade", "c"] = (story.keys["cascade", "c"][0], story.revision)
    story.send(KeyUnreadable(bucket="cascade", key="c", revision=story.revision))
    story.tick(1.0, alive=(("w0", "nano"),))
    assert _thresholds(story.plan) == [33.0, 0.0]
    assert story.plan.epoch == 4
    assert story.keys["cascade", "c"][1] == story.revision
