"""The supervisor as a provisioner: instances that are started and stopped on order."""

import re
import signal
from collections.abc import Mapping, Sequence

import msgspec
import pytest
from millrace.actor.effects import CancelTimer, Effect, Publish, Reply, StartTimer, Stop
from millrace.actor.errors import ConfigError
from millrace.cluster.reading import parse_cluster
from millrace.cluster.toml_text import cluster_toml
from millrace.contracts.coordinator import OrderRefusal, OrderRefused
from millrace.contracts.local import StopRequested, TimerFired
from millrace.contracts.message import Body, Message
from millrace.contracts.provisioner import ClusterCompared, InstanceOrdered, StartInstance, StopInstance
from millrace.contracts.status import PresenceState, ServicePresence
from millrace.contracts.worker import DrainWorker

from services.supervisor.actor import RETIRE_GRACE_NS, SupervisorActor
from services.supervisor.config import ChildSpec, LaunchOptions
from services.supervisor.effects import ChildExited, ChildStarted, SignalChild, SpecificationRead, StartChild
from services.supervisor.layout import Layout
from services.supervisor.roster import ORDERS_MAX, Roster

S = 1_000_000_000


def worker(name: str, *instances: str) -> ChildSpec:
    presences = list(instances or [name])
    return ChildSpec(name=name, role="worker", command=["w"], presences=presences, stop_order=2, model="m")


FIRST = worker("worker-0")
SHARED = worker("worker-1", "worker-1-0", "worker-1-1")
SPARES = [worker("worker-2"), worker("worker-3")]


class Bench:
    """A supervisor with two workers, one of which is shared, and two spare ones, unless others are given."""

    def __init__(
        self,
        running: Sequence[ChildSpec] = (FIRST, SHARED),
        spares: Sequence[ChildSpec] = SPARES,
        devices: Mapping[str, int] | None = None,
    ) -> None:
        self.workers = [*running, *spares]
        roster = Roster(host="here", workers=self.workers, devices=devices)
        self.actor = SupervisorActor(
            name="supervisor", cluster="local", incarnation=1, children=list(running), roster=roster
        )
        self.now_ns = 1_000 * S
        self.orders = 0
        self.actor.start(self.now_ns)
        for pid, spec in enumerate(running, 10):
            self.run(spec.name, pid)

    def send(self, body: Body) -> list[Effect]:
        effects = self.actor.handle(Message(body, reply_to="inbox"), self.now_ns)
        self.actor.check_invariants()
        return effects

    def run(self, child: str, pid: int) -> None:
        self.send(ChildStarted(name=child, pid=pid))
        for name in next(spec.presences for spec in self.workers if spec.name == child):
            self.send(ServicePresence(role="worker", name=name, incarnation=self.now_ns, at_ns=self.now_ns))

    def order(self, order: str = "", model: str = "m", **fields: str) -> list[Effect]:
        self.orders += 1
        return self.send(StartInstance(order=order or str(self.orders), model=model, **fields))

    def retire(self, instance: str, limit_ms: int = 10_000) -> list[Effect]:
        return self.send(StopInstance(instance=instance, drain_limit_ms=limit_ms))

    def states(self) -> dict[str, str]:
        return {name: str(child["state"]) for name, child in self.actor.snapshot().items()}


def reply(effects: list[Effect]) -> Body:
    (answer,) = [effect for effect in effects if isinstance(effect, Reply)]
    assert answer.to == "inbox"
    return answer.body


def refusal(effects: list[Effect]) -> OrderRefusal:
    body = reply(effects)
    assert isinstance(body, OrderRefused)
    return body.reason


def signalled(effects: list[Effect]) -> list[tuple[str, int]]:
    return [(effect.name, effect.signal) for effect in effects if isinstance(effect, SignalChild)]


def drained(effects: list[Effect]) -> list[tuple[str, int]]:
    return [
        (effect.subject, effect.body.limit_ms)
        for effect in effects
        if isinstance(effect, Publish) and isinstance(effect.body, DrainWorker)
    ]


def drained_told(bench: Bench) -> list[tuple[str, str]]:
    """Return what the next presence says of drained instances."""
    bodies = [effect.body for effect in bench.send(TimerFired(name="tick")) if isinstance(effect, Publish)]
    (presence,) = [body for body in bodies if isinstance(body, ServicePresence) and body.role == "supervisor"]
    return [(each.instance, each.model) for each in presence.drained]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_an_order_starts_the_first_spare_worker_once_and_names_it_at_once(bench: Bench) -> None:
    effects = bench.order("x")
    assert reply(effects) == InstanceOrdered(instance="worker-2")
    assert [effect.spec for effect in effects if isinstance(effect, StartChild)] == [SPARES[0]]
    assert bench.order("x") == [effect for effect in effects if isinstance(effect, Reply)]
    bench.run("worker-2", 12)
    assert bench.states()["worker-2"] == "ready"


def test_a_stopped_instance_drains_and_once_it_ended_its_name_is_free_again(bench: Bench) -> None:
    effects = bench.retire("worker-0")
    assert reply(effects) == InstanceOrdered(instance="worker-0")
    assert drained(effects) == [("mr.local.engine.worker-0.drain", 10_000)]
    assert signalled(effects) == []
    assert [getattr(reply(bench.order()), "instance", "") for _ in range(3)] == ["worker-2", "worker-3", ""]
    effects = bench.send(ChildExited(name="worker-0", pid=10, status=0))
    dead = [effect.body for effect in effects if isinstance(effect, Publish)]
    assert [(body.name, body.state) for body in dead if isinstance(body, ServicePresence)] == [
        ("worker-0", PresenceState.DEAD)
    ]
    assert not [effect for effect in effects if isinstance(effect, StartTimer)]
    cancelled = {effect.name for effect in effects if isinstance(effect, CancelTimer)}
    assert cancelled >= {"retire/worker-0", "kill/worker-0"}
    assert "worker-0" not in bench.states()
    assert drained_told(bench) == [], "that is for operators"
    assert reply(bench.order()) == InstanceOrdered(instance="worker-0")


def test_a_drain_is_said_again_with_the_earlier_end_and_then_helped_by_signals(bench: Bench) -> None:
    effects = bench.retire("worker-0", 5_000)
    timers = {effect.name: effect.at_ns for effect in effects if isinstance(effect, StartTimer)}
    term_ns = bench.now_ns + 5 * S + RETIRE_GRACE_NS
    assert timers == {"retire/worker-0": term_ns, "kill/worker-0": term_ns + FIRST.stop_limit_ms * 1_000_000}
    bench.now_ns += S
    assert drained(bench.send(TimerFired(name="tick"))) == [("mr.local.engine.worker-0.drain", 4_000)]
    assert drained(bench.retire("worker-0", 60_000)) == [("mr.local.engine.worker-0.drain", 4_000)]
    assert drained(bench.retire("worker-0", 0)) == [("mr.local.engine.worker-0.drain", 0)]
    assert signalled(bench.send(TimerFired(name="retire/worker-0"))) == [("worker-0", signal.SIGTERM)]
    assert signalled(bench.send(TimerFired(name="kill/worker-0"))) == [("worker-0", signal.SIGKILL)]


def test_one_that_starts_is_ended_by_signal_as_soon_as_it_has_a_process(bench: Bench) -> None:
    bench.order()
    effects = bench.retire("worker-2")
    assert StartTimer(name="retire/worker-2", at_ns=bench.now_ns) in effects
    assert signalled(bench.send(TimerFired(name="retire/worker-2"))) == []
    assert signalled(bench.send(ChildStarted(name="worker-2", pid=12))) == [("worker-2", signal.SIGTERM)]
    bench.send(ChildExited(name="worker-2", pid=12, status=-15))
    assert "worker-2" not in bench.states()


def test_one_that_keeps_failing_is_forgotten_at_once(bench: Bench) -> None:
    bench.order()
    bench.send(ChildStarted(name="worker-2", pid=12))
    bench.send(ChildExited(name="worker-2", pid=12, status=1))
    effects = bench.retire("worker-2")
    assert CancelTimer(name="restart/worker-2") in effects
    assert "worker-2" not in bench.states()
    assert bench.send(TimerFired(name="restart/worker-2")) == []


@pytest.mark.parametrize(
    ("instance", "reason"),
    [
        ("worker-1-0", OrderRefusal.SHARED_PROCESS),
        ("worker-9", OrderRefusal.UNKNOWN_INSTANCE),
        ("worker-2", OrderRefusal.UNKNOWN_INSTANCE),
    ],
)
def test_what_cannot_be_stopped_is_refused(instance: str, reason: OrderRefusal) -> None:
    assert refusal(Bench().retire(instance)) is reason


def test_while_everything_stops_nothing_is_started_and_stops_are_taken_for_done(bench: Bench) -> None:
    bench.retire("worker-0")
    bench.send(StopRequested())
    assert refusal(bench.order()) is OrderRefusal.STOPPING
    assert reply(bench.retire("worker-0")) == InstanceOrdered(instance="worker-0")
    bench.send(ChildExited(name="worker-0", pid=10, status=0))
    assert isinstance(bench.send(ChildExited(name="worker-1", pid=11, status=0))[-1], Stop)


def test_orders_are_remembered_up_to_a_bound() -> None:
    roster = Roster(host="h", workers=[])
    for index in range(ORDERS_MAX + 1):
        roster.carried_out(str(index), "w")
    assert roster.instance_of("0") is None
    assert roster.instance_of(str(ORDERS_MAX)) == "w"


OTHERS = [
    ChildSpec(name=name, role="worker", command=["w"], presences=[name], model=model, shape=shape)
    for name, model, shape in (("a0", "a", "cpu"), ("b0", "b", "cpu"), ("b1", "b", "h100"), ("b2", "b", "h100"))
]


def test_a_spare_is_started_by_its_model_and_shape_up_to_the_bound_of_the_model() -> None:
    bench = Bench(OTHERS[:1], OTHERS[1:])
    assert reply(bench.order(model="a")) == OrderRefused(
        reason=OrderRefusal.AT_BOUND, detail="1 instances of a are the bound (--instances-max)"
    )
    assert refusal(bench.order(model="c")) is OrderRefusal.OTHER_MODEL
    refused = reply(bench.order(model="b", shape="tpu"))
    assert refused.reason is OrderRefusal.UNKNOWN_SHAPE
    assert "no tpu for b here; shapes: " in refused.detail
    started = [reply(bench.order(model="b", shape=shape)) for shape in ("h100", "", "")]
    assert started == [InstanceOrdered(instance=name) for name in ("b1", "b0", "b2")]


class Drained(Bench):
    """Both workers with an instance of their own, drained by an operator; two spares."""

    def __init__(self) -> None:
        super().__init__()
        self.drain("worker-0", 10)

    def drain(self, name: str, pid: int) -> list[Effect]:
        answer = self.send(StopInstance(instance=name, drain_limit_ms=0, operator=True))
        self.send(ChildExited(name=name, pid=pid, status=0))
        return answer

    def back(self, name: str) -> Body:
        return reply(self.order(model="", instance=name))


def test_every_instance_can_be_drained_and_each_comes_back() -> None:
    bench = Drained()
    for name in ("worker-2", "worker-3"):
        assert isinstance(bench.back(name), InstanceOrdered)
        bench.run(name, 20)
        bench.drain(name, 20)
    assert drained_told(bench) == [(name, "m") for name in ("worker-0", "worker-2", "worker-3")]
    for name in ("worker-3", "worker-0", "worker-2"):
        assert bench.back(name) == InstanceOrdered(instance=name)
    assert bench.states()["worker-0"] == "starting"
    assert drained_told(bench) == []


def test_provisioning_leaves_alone_what_an_operator_drained() -> None:
    bench = Drained()
    assert [getattr(reply(bench.order()), "instance", "") for _ in range(2)] == ["worker-2", "worker-3"]
    refused = reply(bench.order())
    assert isinstance(refused, OrderRefused)
    assert refused.detail == "5 instances of m are the bound (--instances-max), 1 drained by an operator"


@pytest.mark.parametrize(
    ("name", "reason", "detail"),
    [
        ("worker-9", OrderRefusal.UNKNOWN_INSTANCE, "worker-9 is none of this host"),
        ("worker-1-0", OrderRefusal.RUNS, "worker-1-0 runs already"),
        ("worker-2", OrderRefusal.RUNS, "worker-2 still drains"),
    ],
)
def test_what_cannot_be_brought_back_is_refused_with_the_reason(name: str, reason: OrderRefusal, detail: str) -> None:
    bench = Drained()
    bench.back("worker-2")
    bench.run("worker-2", 20)
    bench.retire("worker-2")
    assert bench.back(name) == OrderRefused(reason=reason, detail=detail)


@pytest.fixture
def pool() -> Bench:
    """A supervisor of two devices: one worker of each of two models runs, and each of four models has a spare."""
    w0, w1, w2, w3, w4, w5 = (
        msgspec.structs.replace(worker(f"w{number}"), model=model, device="cpu", devices=devices)
        for number, (model, devices) in enumerate(
            [("nano", 1), ("mini", 1), ("nano", 1), ("micro", 1), ("mini", 1), ("wide", 2)]
        )
    )
    return Bench([w0, w1], [w2, w3, w4, w5], devices={"cpu": 2})


def test_a_spare_starts_only_where_its_device_is_free_whatever_its_model(pool: Bench) -> None:
    for model, instance in (("nano", ""), ("micro", ""), ("micro", "w3")):
        refused = reply(pool.order(model=model, instance=instance))
        assert refused.reason is OrderRefusal.NO_DEVICE
        assert "2 of 2 are taken" in refused.detail
    pool.retire("w0")
    assert refusal(pool.order(model="micro")) is OrderRefusal.NO_DEVICE  # it drains, and holds its device
    pool.send(ChildExited(name="w0", pid=10, status=0))
    assert refusal(pool.order(model="wide")) is OrderRefusal.NO_DEVICE  # it needs both
    assert reply(pool.order(model="micro")) == InstanceOrdered(instance="w3")
    assert refusal(pool.order(model="mini")) is OrderRefusal.NO_DEVICE


def test_a_worker_that_takes_several_devices_starts_where_all_are_free(pool: Bench) -> None:
    for name, pid in (("w0", 10), ("w1", 11)):
        pool.retire(name)
        pool.send(ChildExited(name=name, pid=pid, status=0))
    assert reply(pool.order(model="wide")) == InstanceOrdered(instance="w5")


def test_a_worker_that_is_restarted_keeps_its_device(pool: Bench) -> None:
    pool.send(ChildExited(name="w0", pid=10, status=1))
    assert refusal(pool.order(model="nano")) is OrderRefusal.NO_DEVICE


POOL = """
[devices]
cpu = 2
[cascade]
tiers = ["nano", "micro", "mini"]
[[models]]
name = "nano"
path = "."
groups = [{ engine = "modelled", spares = 1 }]
[[models]]
name = "micro"
path = "."
groups = [{ engine = "modelled", count = 0, spares = 2 }]
[[models]]
name = "mini"
path = "."
groups = [{ engine = "modelled", spares = 1 }]
"""


def test_a_file_with_devices_gives_every_worker_its_place_in_the_pool() -> None:
    config = Layout(LaunchOptions(spec=parse_cluster(POOL))).plan()
    workers = [child for child in config.children if child.role == "worker"]
    assert [(child.model, child.device, child.devices) for child in workers] == [("nano", "cpu", 1), ("mini", "cpu", 1)]
    assert [child.model for child in config.spares] == ["nano", "micro", "micro", "mini"]
    assert config.devices == {"cpu": 2}
    assert parse_cluster(cluster_toml(parse_cluster(POOL))) == parse_cluster(POOL)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("cpu = 2", "cpu = 1", "devices.cpu: 1, but the instances at the start take 2"),
        ("count = 0, spares = 2", "count = 0", "count: 0"),
    ],
)
def test_a_pool_that_cannot_be_is_refused(old: str, new: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse_cluster(POOL.replace(old, new))


# comparison with a specification, as `millrace apply` asks for

CLUSTER = """
[[models]]
name = "m"
path = "m"
groups = [{ count = 2, engine = "modelled", processes = 2 }]
"""


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("", "", {}),
        ("count = 2", "count = 2, settings = { max_num_seqs = 9 }", {"worker-0": "changed", "worker-1": "changed"}),
        ("count = 2", "names = ['worker-0']", {"worker-1": "removed", "migrator-1": "removed"}),
        (
            "[[models]]",
            "[policies]\ndispatch.name = 'random'\n[[models]]",
            {"ingress-0": "removed", "ingress-1": "added"},
        ),
    ],
)
def test_processes_that_differ_from_the_specification_are_told_and_no_others(old, new, expected):
    running = Layout(LaunchOptions(spec=parse_cluster(CLUSTER), cores=[0]))
    config = running.plan()
    bench = Bench([*config.nats, *config.children], [])
    options = LaunchOptions(spec=parse_cluster(CLUSTER.replace(old, new)), cores=[0])
    machine = Layout.following(options, running, {spec.name: spec for spec in config.children}).plan()
    effects = bench.send(SpecificationRead(take=True, reply_to="inbox", machine=machine))
    (answer,) = (body for effect in effects if isinstance(body := getattr(effect, "body", None), ClusterCompared))
    assert {row.name: str(row.change) for row in answer.processes if row.change != "same"} == expected
