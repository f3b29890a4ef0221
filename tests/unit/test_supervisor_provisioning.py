"""The supervisor as a provisioner: instances that are started and stopped on order."""

import re
import signal

import msgspec
import pytest
from millrace.actor.effects import CancelTimer, Effect, Publish, Reply, StartTimer, Stop
from millrace.actor.errors import ConfigError
from millrace.cluster.reading import parse_cluster
from millrace.cluster.toml_text import cluster_toml
from millrace.contracts.coordinator import OrderRefusal, OrderRefused
from millrace.contracts.local import StopRequested, TimerFired
from millrace.contracts.message import Body, Message
from millrace.contracts.provisioner import InstanceOrdered, StartInstance, StopInstance
from millrace.contracts.status import PresenceState, ServicePresence
from millrace.contracts.worker import DrainWorker

from services.supervisor.actor import RETIRE_GRACE_NS, SupervisorActor
from services.supervisor.config import ChildSpec, LaunchOptions
from services.supervisor.effects import ChildExited, ChildStarted, SignalChild, StartChild
from services.supervisor.layout import Layout
from services.supervisor.roster import ORDERS_MAX, Roster

S = 1_000_000_000


def worker(name: str, *instances: str) -> ChildSpec:
    return ChildSpec(name=name, role="worker", command=["w"], presences=list(instances or [name]), stop_order=2)


FIRST = worker("worker-0")
SHARED = worker("worker-1", "worker-1-0", "worker-1-1")
SPARES = [worker("worker-2"), worker("worker-3")]


class Bench:
    """A supervisor with two workers, one of which is shared, and two spare ones."""

    def __init__(self) -> None:
        roster = Roster(host="here", model="m", workers=[FIRST, SHARED, *SPARES])
        self.actor = SupervisorActor(
            name="supervisor", cluster="local", incarnation=1, children=[FIRST, SHARED], roster=roster
        )
        self.now_ns = 1_000 * S
        self.orders = 0
        self.effects = self.actor.start(self.now_ns)
        self.run("worker-0", 10)
        self.run("worker-1", 11)

    def send(self, body: Body) -> list[Effect]:
        effects = self.actor.handle(Message(body, reply_to="inbox"), self.now_ns)
        self.actor.check_invariants()
        return effects

    def run(self, child: str, pid: int) -> None:
        self.send(ChildStarted(name=child, pid=pid))
        for spec in [FIRST, SHARED, *SPARES]:
            for name in spec.presences if spec.name == child else []:
                self.send(ServicePresence(role="worker", name=name, incarnation=self.now_ns, at_ns=self.now_ns))

    def order(self, order: str = "", model: str = "m") -> list[Effect]:
        self.orders += 1
        return self.send(StartInstance(order=order or str(self.orders), model=model))

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


def test_an_order_starts_the_first_spare_worker_and_names_it_at_once() -> None:
    bench = Bench()
    effects = bench.order("x")
    assert reply(effects) == InstanceOrdered(instance="worker-2")
    assert [effect.spec for effect in effects if isinstance(effect, StartChild)] == [SPARES[0]]
    bench.run("worker-2", 12)
    assert bench.states()["worker-2"] == "ready"


def test_the_same_order_again_is_the_same_instance() -> None:
    bench = Bench()
    bench.order("x")
    again = bench.order("x")
    assert reply(again) == InstanceOrdered(instance="worker-2")
    assert len(again) == 1


def test_beyond_the_roster_and_for_another_model_it_refuses() -> None:
    bench = Bench()
    assert refusal(bench.order(model="other")) is OrderRefusal.OTHER_MODEL
    bench.order()
    bench.order()
    assert refusal(bench.order()) is OrderRefusal.AT_BOUND
    assert len(bench.states()) == 4


def test_a_stopped_instance_drains_and_once_it_ended_its_name_is_free_again() -> None:
    bench = Bench()
    effects = bench.retire("worker-0")
    assert reply(effects) == InstanceOrdered(instance="worker-0")
    assert drained(effects) == [("mr.local.engine.worker-0.drain", 10_000)]
    assert signalled(effects) == []
    effects = bench.send(ChildExited(name="worker-0", pid=10, status=0))
    dead = [effect.body for effect in effects if isinstance(effect, Publish)]
    assert [(body.name, body.state) for body in dead if isinstance(body, ServicePresence)] == [
        ("worker-0", PresenceState.DEAD)
    ]
    assert not [effect for effect in effects if isinstance(effect, StartTimer)]
    assert {effect.name for effect in effects if isinstance(effect, CancelTimer)} >= {
        "retire/worker-0",
        "kill/worker-0",
    }
    assert "worker-0" not in bench.states()
    assert reply(bench.order()) == InstanceOrdered(instance="worker-0")


def test_a_draining_one_still_holds_its_place() -> None:
    bench = Bench()
    bench.order()
    bench.order()
    bench.retire("worker-0")
    assert refusal(bench.order()) is OrderRefusal.AT_BOUND


def test_a_lost_drain_is_said_again_and_then_helped_by_signals() -> None:
    bench = Bench()
    effects = bench.retire("worker-0", 5_000)
    timers = {effect.name: effect.at_ns for effect in effects if isinstance(effect, StartTimer)}
    term_ns = bench.now_ns + 5 * S + RETIRE_GRACE_NS
    assert timers == {"retire/worker-0": term_ns, "kill/worker-0": term_ns + FIRST.stop_limit_ms * 1_000_000}
    bench.now_ns += S
    assert drained(bench.send(TimerFired(name="tick"))) == [("mr.local.engine.worker-0.drain", 4_000)]
    assert signalled(bench.send(TimerFired(name="retire/worker-0"))) == [("worker-0", signal.SIGTERM)]
    assert signalled(bench.send(TimerFired(name="kill/worker-0"))) == [("worker-0", signal.SIGKILL)]


def test_asked_twice_the_earlier_end_holds() -> None:
    bench = Bench()
    bench.retire("worker-0", 10_000)
    assert drained(bench.retire("worker-0", 60_000)) == [("mr.local.engine.worker-0.drain", 10_000)]
    assert drained(bench.retire("worker-0", 0)) == [("mr.local.engine.worker-0.drain", 0)]


def test_one_that_starts_is_ended_by_signal_as_soon_as_it_has_a_process() -> None:
    bench = Bench()
    bench.order()
    effects = bench.retire("worker-2")
    assert StartTimer(name="retire/worker-2", at_ns=bench.now_ns) in effects
    assert signalled(bench.send(TimerFired(name="retire/worker-2"))) == []
    assert signalled(bench.send(ChildStarted(name="worker-2", pid=12))) == [("worker-2", signal.SIGTERM)]
    bench.send(ChildExited(name="worker-2", pid=12, status=-15))
    assert "worker-2" not in bench.states()


def test_one_that_keeps_failing_is_forgotten_at_once() -> None:
    bench = Bench()
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


def test_while_everything_stops_nothing_is_started_and_stops_are_taken_for_done() -> None:
    bench = Bench()
    bench.retire("worker-0")
    bench.send(StopRequested())
    assert refusal(bench.order()) is OrderRefusal.STOPPING
    assert reply(bench.retire("worker-0")) == InstanceOrdered(instance="worker-0")
    bench.send(ChildExited(name="worker-0", pid=10, status=0))
    assert isinstance(bench.send(ChildExited(name="worker-1", pid=11, status=0))[-1], Stop)


def test_orders_are_remembered_up_to_a_bound() -> None:
    roster = Roster(host="h", model="", workers=[])
    for index in range(ORDERS_MAX + 1):
        roster.carried_out(str(index), "w")
    assert roster.instance_of("0") is None
    assert roster.instance_of(str(ORDERS_MAX)) == "w"


def layout_of(group: str, rest: str = "") -> Layout:
    spec = parse_cluster(f'[[models]]\nname = "m"\npath = "/m"\n[[models.groups]]\n{group}\n{rest}')
    return Layout(LaunchOptions(spec=spec, cores=[0]))


@pytest.mark.parametrize(
    ("group", "rest", "first", "spares"),
    [
        ('engine = "modelled"\ncount = 2', "", ["worker-0-0", "worker-0-1"], []),
        (
            'engine = "modelled"\ncount = 2\nspares = 2',
            '[policies.provisioning]\nname = "relief"',
            ["worker-0", "worker-1"],
            ["worker-2", "worker-3"],
        ),
        ('engine = "modelled"\ncount = 2\nspares = 1', "", ["worker-0", "worker-1"], ["worker-2"]),
        ("spares = 2", "", ["worker-0"], ["worker-1", "worker-2"]),
    ],
)
def test_the_layout_keeps_spare_workers_with_files_and_names_of_their_own(
    group: str, rest: str, first: list[str], spares: list[str]
) -> None:
    layout = layout_of(group, rest)
    config = layout.plan()
    running = [name for child in config.children if child.role == "worker" for name in child.presences]
    assert running == first
    assert [spec.name for spec in config.spares] == spares
    names = [spec.name for spec in config.spares] + [child.name for child in config.children]
    assert len(names) == len(set(names))
    written = {path.stem for path in layout._files}
    assert {spec.name for spec in config.spares} <= written


def test_the_coordinator_gets_the_strategy_with_the_bounds_and_what_else_was_said() -> None:
    layout = layout_of(
        'engine = "modelled"\ncount = 2\nspares = 1\nhost = "rack-1"',
        '[policies.provisioning]\nname = "relief"\nparameters = { threshold_s = 2 }',
    )
    layout.plan()
    (content,) = [content for path, content in layout._files.items() if path.stem == "coordinator-0"]
    assert msgspec.json.decode(content)["provisioning"] == {
        "strategy": "relief",
        "parameters": {"instances_min": 2, "instances_max": 3, "threshold_s": 2},
        "hosts": ["rack-1"],
    }


OTHERS = [
    ChildSpec(name=name, role="worker", command=["w"], presences=[name], model=model, shape=shape)
    for name, model, shape in (("a0", "a", "cpu"), ("b0", "b", "cpu"), ("b1", "b", "h100"), ("b2", "b", "h100"))
]


def test_a_spare_is_started_by_its_model_and_shape() -> None:
    roster = Roster(host="here", workers=OTHERS)
    assert roster.models == {"a", "b"}
    assert [getattr(roster.free(used, model="b"), "name", None) for used in ([], ["b0"], ["b0", "b1", "b2"])] == [
        "b0",
        "b1",
        None,
    ]
    assert getattr(roster.free([], model="b", shape="h100"), "name", None) == "b1"
    assert roster.free([], model="b", shape="h100x2") is None
    assert (roster.instances_max("a"), roster.instances_max("b")) == (1, 3)


def test_a_model_at_its_bound_is_refused_while_another_has_room() -> None:
    roster = Roster(host="here", workers=OTHERS)
    actor = SupervisorActor(name="s", cluster="local", incarnation=1, children=OTHERS[:1], roster=roster)
    actor.start(0)

    def order(model: str) -> Body:
        return reply(actor.handle(Message(StartInstance(order=model, model=model), reply_to="inbox"), 0))

    refused = order("a")
    assert isinstance(refused, OrderRefused)
    assert (refused.reason, refused.detail) == (OrderRefusal.AT_BOUND, "1 instances of a are the bound")
    assert order("b") == InstanceOrdered(instance="b0")
    assert isinstance(order("c"), OrderRefused)


def test_a_shape_that_no_worker_has_is_refused_by_the_shapes_that_there_are() -> None:
    roster = Roster(host="here", workers=OTHERS)
    actor = SupervisorActor(name="s", cluster="local", incarnation=1, children=[], roster=roster)
    actor.start(0)
    order = StartInstance(order="o", model="b", shape="tpu")
    refused = reply(actor.handle(Message(order, reply_to="inbox"), 0))
    assert isinstance(refused, OrderRefused)
    assert refused.reason is OrderRefusal.UNKNOWN_SHAPE
    assert "no tpu for b here; shapes: " in refused.detail


class Drained(Bench):
    """Both workers with an instance of their own, drained by an operator; two spares."""

    def __init__(self) -> None:
        super().__init__()
        self.drain("worker-0", 10)

    def drain(self, name: str, pid: int) -> list[Effect]:
        answer = self.send(StopInstance(instance=name, drain_limit_ms=0, operator=True))
        self.send(ChildExited(name=name, pid=pid, status=0))
        return answer

    def told(self) -> list[tuple[str, str]]:
        """Return what the next presence says of drained instances."""
        effects = self.send(TimerFired(name="tick"))
        bodies = [effect.body for effect in effects if isinstance(effect, Publish)]
        (presence,) = [body for body in bodies if isinstance(body, ServicePresence) and body.role == "supervisor"]
        return [(each.instance, each.model) for each in presence.drained]

    def back(self, name: str) -> Body:
        self.orders += 1
        return reply(self.send(StartInstance(order=str(self.orders), model="", instance=name)))


def test_what_an_operator_drained_is_told_of_until_it_is_started_by_its_name() -> None:
    bench = Drained()
    assert bench.told() == [("worker-0", "")]
    assert bench.back("worker-0") == InstanceOrdered(instance="worker-0")
    assert bench.states()["worker-0"] == "starting"
    assert bench.told() == []


def test_every_instance_can_be_drained_and_each_comes_back() -> None:
    bench = Drained()
    for name in ("worker-2", "worker-3"):
        assert isinstance(bench.back(name), InstanceOrdered)
        bench.run(name, 20)
        bench.drain(name, 20)
    assert [name for name, _ in bench.told()] == ["worker-0", "worker-2", "worker-3"]
    for name in ("worker-3", "worker-0", "worker-2"):
        assert bench.back(name) == InstanceOrdered(instance=name)


def test_provisioning_leaves_alone_what_an_operator_drained() -> None:
    bench = Drained()
    assert [getattr(reply(bench.order()), "instance", "") for _ in range(2)] == ["worker-2", "worker-3"]
    refused = reply(bench.order())
    assert isinstance(refused, OrderRefused)
    assert refused.detail == "5 instances of m are the bound, 1 drained by an operator"


def test_what_provisioning_stopped_is_not_told_of_and_may_be_started_again_by_anyone() -> None:
    bench = Bench()
    bench.retire("worker-0", 0)
    bench.send(ChildExited(name="worker-0", pid=10, status=0))
    assert Drained.told(bench) == []  # type: ignore[arg-type]
    assert reply(bench.order()) == InstanceOrdered(instance="worker-0")


@pytest.mark.parametrize(
    ("name", "reason", "detail"),
    [
        ("worker-9", OrderRefusal.UNKNOWN_INSTANCE, "worker-9 is none of this host"),
        ("worker-1-0", OrderRefusal.RUNS, "worker-1-0 runs already"),
    ],
)
def test_what_cannot_be_brought_back_is_refused_with_the_reason(name: str, reason: OrderRefusal, detail: str) -> None:
    assert Drained().back(name) == OrderRefused(reason=reason, detail=detail)


def test_one_that_still_drains_cannot_be_brought_back_yet() -> None:
    bench = Bench()
    bench.send(StopInstance(instance="worker-0", drain_limit_ms=0, operator=True))
    assert Drained.back(bench, "worker-0") == OrderRefused(  # type: ignore[arg-type]
        reason=OrderRefusal.RUNS, detail="worker-0 still drains"
    )


class DevicePool:
    """A supervisor of two devices: one worker of each of two models runs, and each of three models has a spare."""

    def __init__(self) -> None:
        def on_device(name: str, model: str, devices: int = 1) -> ChildSpec:
            return msgspec.structs.replace(worker(name), model=model, device="cpu", devices=devices)

        running = [on_device("w0", "nano"), on_device("w1", "mini")]
        spares = [
            on_device("w2", "nano"),
            on_device("w3", "micro"),
            on_device("w4", "mini"),
            on_device("w5", "wide", 2),
        ]
        roster = Roster(host="here", workers=[*running, *spares], devices={"cpu": 2})
        self.actor = SupervisorActor(name="s", cluster="local", incarnation=1, children=running, roster=roster)
        self.actor.start(S)
        self.actor.adopt("w0", 10, S)
        self.actor.adopt("w1", 11, S)
        self.orders = 0

    def send(self, body: Body) -> Body:
        answers = [
            effect for effect in self.actor.handle(Message(body, reply_to="inbox"), S) if isinstance(effect, Reply)
        ]
        return answers[0].body if answers else body

    def start(self, model: str, instance: str = "") -> Body:
        self.orders += 1
        return self.send(StartInstance(order=str(self.orders), model=model, instance=instance))


def test_a_spare_starts_only_where_its_device_is_free_whatever_its_model() -> None:
    pool = DevicePool()
    for model, instance in (("nano", ""), ("micro", ""), ("micro", "w3")):
        refused = pool.start(model, instance)
        assert isinstance(refused, OrderRefused)
        assert refused.reason is OrderRefusal.NO_DEVICE
        assert "2 of 2 are taken" in refused.detail
    assert isinstance(pool.send(StopInstance(instance="w0")), InstanceOrdered)
    assert isinstance(pool.start("micro"), OrderRefused)  # it drains, and holds its device
    pool.send(ChildExited(name="w0", pid=10, status=0))
    assert pool.start("micro") == InstanceOrdered(instance="w3")
    assert isinstance(pool.start("mini"), OrderRefused)


def test_a_worker_that_takes_several_devices_needs_them_all() -> None:
    pool = DevicePool()
    pool.send(StopInstance(instance="w0"))
    pool.send(ChildExited(name="w0", pid=10, status=0))
    assert isinstance(pool.start("wide"), OrderRefused)
    pool.send(StopInstance(instance="w1"))
    pool.send(ChildExited(name="w1", pid=11, status=0))
    assert isinstance(pool.start("wide"), InstanceOrdered)


def test_a_worker_that_is_restarted_keeps_its_device() -> None:
    pool = DevicePool()
    pool.send(ChildExited(name="w0", pid=10, status=1))
    assert isinstance(pool.start("nano"), OrderRefused)


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
