"""One broker process with many instances, and its view of large stages: what it hears, what it tells, whom it finds."""

from random import Random

import msgspec
from millrace.actor.config import BusConfig
from millrace.actor.effects import Effect, Publish, Subscribe
from millrace.contracts.broker import LoadReported, LoadsReported, MoveReason
from millrace.contracts.local import KeyChanged, TimerFired
from millrace.contracts.message import Body, Message
from millrace.contracts.plan import InstanceRole
from millrace.hosting.step_times import StepTimeDeps

from services.broker.actor import BrokerActor
from services.broker.build import build
from services.broker.cluster_view import LOOKED_AT, BrokerView, sampled
from services.broker.config import BrokerConfig, TradingConfig
from tests.testbed.messages import plain
from tests.unit.broker_rig import MODEL, MS, SECOND, START_NS, STEP_TIME, FakeInstance, plan

OWN = ["a", "b", "c"]


def key(name: str, value: object, bucket: str = "instance") -> Message:
    return Message(KeyChanged(bucket=bucket, key=name, value=value, revision=1), "", "", "", "")  # type: ignore[arg-type]


class Process:
    """A broker process with three instances, of which the last serves in a stage of its own, beside a stranger."""

    def __init__(self) -> None:
        config = BrokerConfig(
            name="p", instances=OWN, trading=TradingConfig(policy="delay"), bus=BusConfig(cluster="test")
        )
        deps = StepTimeDeps(incarnation=1, rng=Random(1), step_times={"linear": STEP_TIME})
        self.actor: BrokerActor = build(config, deps)
        self.now_ns = START_NS
        self.started = self.actor.start(self.now_ns)
        self.effects: list[Effect] = []
        self.instances = {name: FakeInstance(name) for name in [*OWN, "stranger"]}
        for each in self.instances.values():
            self.hear(key(each.name, each.record()))
        self.hear(key(MODEL, plan((0, ["a", "b", "stranger"]), (1_000, ["c"])), "plan"))

    def hear(self, message: Message) -> None:
        self.effects += self.actor.handle(message, self.now_ns)

    def say(self, body: Body, sender: str, subject: str = "") -> None:
        self.hear(Message(body, subject, sender, "", ""))

    def tick(self, ms: int = 200) -> list[Body]:
        """Fresh snapshots of the own instances, a tick later. Returns what is published."""
        self.now_ns += ms * MS
        for name in OWN:
            self.say(self.instances[name].snapshot(self.now_ns), name)
        self.effects = []
        self.hear(Message(TimerFired(name="tick"), "", "", "", ""))
        return [effect.body for effect in self.effects if isinstance(effect, Publish)]

    def load_of(self, name: str) -> LoadReported:
        held = {"tokens": 10, "running": 1, "blocks_total": 2_000}
        return plain(LoadReported, instance=name, stage="s1" if name == "c" else "s0", at_ns=self.now_ns, **held)

    def heard(self) -> list[str]:
        return self.actor.snapshot()["loads"]


def test_loads_of_a_stage_go_out_in_one_message() -> None:
    process = Process()
    told = [body for body in process.tick() if isinstance(body, LoadsReported)]
    assert [[load.instance for load in body.loads] for body in told] == [["a", "b"], ["c"]]
    subjects = [e.subject for e in process.effects if isinstance(e, Publish) and "load" in e.subject]
    assert subjects == ["mr.test.load.m.s0", "mr.test.load.m.s1"]


def test_each_load_of_a_message_is_believed_for_itself() -> None:
    process = Process()
    process.tick()
    strange = process.load_of("stranger")
    process.say(LoadsReported(loads=[strange, process.load_of("a")]), "q", "mr.test.load.m.s0")
    assert process.heard() == ["a", "b", "c", "stranger"]
    absurd = msgspec.structs.replace(strange, at_ns=process.now_ns + 1, blocks_free=strange.blocks_total + 1)
    process.say(LoadsReported(loads=[absurd]), "q", "mr.test.load.m.s0")
    assert process.actor.metrics.refused.total() == 1
    process.say(LoadsReported(loads=[]), "q", "mr.test.load.m.s0")
    assert process.heard() == ["a", "b", "c", "stranger"]


def test_of_workers_only_its_own_are_heard() -> None:
    subjects = {effect.subject for effect in Process().started if isinstance(effect, Subscribe)}
    assert {f"mr.test.presence.worker.{name}" for name in OWN} <= subjects
    assert "mr.test.presence.worker.*" not in subjects


def test_a_repeated_registration_changes_no_subscription() -> None:
    process = Process()
    process.effects = []
    process.hear(key("a", process.instances["a"].record()))
    assert process.effects == []


def view_of(lower: list[str], upper: list[str], *, with_room: set[str]) -> BrokerView:
    """Two stages whose instances were all heard just now; most are full."""
    view = BrokerView(load_age_ns=10 * SECOND)
    names = [*lower, *upper]
    for name in names:
        view.on_record(KeyChanged(bucket="instance", key=name, value=FakeInstance(name).record(), revision=1), START_NS)
    view.on_plan(KeyChanged(bucket="plan", key=MODEL, value=plan((0, lower), (1_000, upper)), revision=1))
    for name in names:
        blocks = {"blocks_free": 1_000 if name in with_room else 0, "blocks_total": 2_000}
        stage = "s0" if name in lower else "s1"
        assert view.on_load(plain(LoadReported, instance=name, stage=stage, at_ns=START_NS, **blocks), START_NS)
    return view


def test_a_candidate_is_looked_up_again_when_anything_about_it_changes() -> None:
    names = ["w0", "w1"]

    def peers(view, now_ns=START_NS) -> list[str]:
        return [load.name for load in view.peers("w0", now_ns)]

    def told(**fields):
        return msgspec.structs.replace(view.heard("w1", START_NS).told, at_ns=START_NS + 1, **fields)

    view = view_of(names, ["u0"], with_room=set(names))
    assert peers(view) == ["w1"]
    assert view.on_load(told(blocks_free=7), START_NS)
    assert [load.blocks_free for load in view.peers("w0", START_NS)] == [7]
    assert view.on_load(told(draining=True), START_NS)
    assert peers(view) == []
    assert view.on_load(told(draining=False), START_NS)
    assert peers(view) == ["w1"]
    only_prefills = plan((0, names), (1_000, ["u0"]), epoch=2, roles={"w1": InstanceRole.PREFILL})
    view.on_plan(KeyChanged(bucket="plan", key=MODEL, value=only_prefills, revision=2))
    assert peers(view) == []


def test_a_candidate_is_none_any_more_when_its_load_is_old_or_it_is_gone() -> None:
    view = view_of(["w0", "w1"], ["u0"], with_room={"w1"})
    assert view.peers("w0", START_NS + 9_999 * MS)
    assert not view.peers("w0", START_NS + 10_000 * MS), "the load is too old"
    view.on_record(KeyChanged(bucket="instance", key="w1", value=None, revision=2), START_NS)
    assert not view.peers("w0", START_NS)


def test_the_parts_of_a_set_are_the_set_and_small_sets_are_whole() -> None:
    names = [f"w{number}" for number in range(3 * LOOKED_AT + 5)]
    for now_ns in (0, SECOND, 7 * SECOND):
        parts = list(sampled(names, "w0", now_ns))
        assert sorted(name for part in parts for name in part) == sorted(names)
        assert max(map(len, parts)) <= LOOKED_AT
    assert list(sampled(names[:LOOKED_AT], "w0", 0)) == [names[:LOOKED_AT]]
    assert list(sampled([], "w0", 0)) == [[]]


def test_of_a_large_stage_some_peers_are_looked_at_and_others_a_second_later() -> None:
    lower = [f"w{number:03}" for number in range(4 * LOOKED_AT)]
    view = view_of(lower, ["u0"], with_room=set(lower))
    first, later = ({load.name for load in view.peers("w000", START_NS + k * SECOND)} for k in (0, 1))
    assert LOOKED_AT - 1 <= len(first) <= LOOKED_AT
    assert not first & later
    few = view_of(lower[:3], ["u0"], with_room=set())
    assert {load.name for load in few.peers("w000", START_NS)} == {"w001", "w002"}


def test_the_only_one_of_a_large_stage_that_has_room_is_found() -> None:
    upper = [f"u{number:03}" for number in range(5 * LOOKED_AT)]
    for roomy in ("u000", "u043", "u079"):
        view = view_of(["w0"], upper, with_room={roomy})
        found = view.targets("w0", MoveReason.BOUNDARY, 2_000, START_NS, blocks=10)
        assert roomy in {load.name for load in found}
        assert len(found) <= LOOKED_AT
