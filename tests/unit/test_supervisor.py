"""The supervisor's actor and the layout of a local cluster."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from millrace.actor.effects import Effect, Publish, StartTimer, Stop
from millrace.actor.errors import ConfigError
from millrace.contracts.catalog import Role
from millrace.contracts.local import StopRequested, TimerFired
from millrace.contracts.message import Body, Message
from millrace.contracts.status import PresenceState, ServicePresence

from services.supervisor.actor import BACKOFF_NS, BACKOFF_NS_MAX, HEALTHY_NS, SupervisorActor
from services.supervisor.config import ChildSpec
from services.supervisor.effects import ChildExited, ChildReady, ChildStarted, SignalChild, StartChild
from services.supervisor.layout import Layout, UpOptions
from services.supervisor.preflight import check

NATS = ChildSpec(name="nats", role="nats", command=["nats-server"], stop_order=9)
ZYGOTE = ChildSpec(name="zygote", role="zygote", command=["zygote"], stop_order=4)
WORKER = ChildSpec(name="w", role="worker", fork_config="w.json", presences=["w"], after="zygote", stop_order=2)
INGRESS = ChildSpec(name="ingress-0", role="ingress", command=["ingress"], presences=["ingress-0"], stop_order=1)


class Bench:
    """A supervisor over four children; nats-server runs already."""

    def __init__(self) -> None:
        children = [NATS, ZYGOTE, WORKER, INGRESS]
        self.actor = SupervisorActor(name="supervisor", cluster="local", incarnation=1, children=children)
        self.now_ns = 1_000_000_000_000
        self.actor.adopt("nats", 10, self.now_ns)
        self.effects = self.actor.start(self.now_ns)

    def send(self, body: Body) -> list[Effect]:
        effects = self.actor.handle(Message(body), self.now_ns)
        self.actor.check_invariants()
        return effects

    def present(self, name: str, role: str, incarnation: int | None = None) -> list[Effect]:
        incarnation = self.now_ns if incarnation is None else incarnation
        return self.send(ServicePresence(role=role, name=name, incarnation=incarnation, at_ns=self.now_ns))

    def all_ready(self) -> None:
        self.send(ChildStarted(name="zygote", pid=11))
        self.send(ChildReady(name="zygote"))
        self.send(ChildStarted(name="w", pid=12))
        self.send(ChildStarted(name="ingress-0", pid=13))
        self.present("w", "worker")
        self.present("ingress-0", "ingress")

    def state(self, name: str) -> str:
        return str(self.actor.snapshot()[name]["state"])


def started(effects: list[Effect]) -> list[str]:
    return [effect.spec.name for effect in effects if isinstance(effect, StartChild)]


def signalled(effects: list[Effect]) -> list[tuple[str, int]]:
    return [(effect.name, effect.signal) for effect in effects if isinstance(effect, SignalChild)]


def test_children_start_at_once_but_those_that_wait_for_another() -> None:
    bench = Bench()
    assert started(bench.effects) == ["zygote", "ingress-0"]
    bench.send(ChildStarted(name="zygote", pid=11))
    assert started(bench.send(ChildReady(name="zygote"))) == ["w"]


def test_a_child_is_ready_with_its_presence_but_not_with_its_predecessors() -> None:
    bench = Bench()
    bench.send(ChildStarted(name="ingress-0", pid=13))
    bench.present("ingress-0", "ingress", incarnation=bench.now_ns - 1)
    assert bench.state("ingress-0") == "starting"
    bench.present("ingress-0", "ingress")
    assert bench.state("ingress-0") == "ready"


def test_a_child_that_ended_is_declared_dead_and_started_again_after_a_pause() -> None:
    bench = Bench()
    bench.all_ready()
    effects = bench.send(ChildExited(name="w", pid=12, status=-9))
    dead = [e.body for e in effects if isinstance(e, Publish)]
    assert [(b.name, b.state) for b in dead if isinstance(b, ServicePresence)] == [("w", PresenceState.DEAD)]
    timers = [e for e in effects if isinstance(e, StartTimer)]
    assert timers == [StartTimer(name="restart/w", at_ns=bench.now_ns + BACKOFF_NS)]
    assert started(bench.send(TimerFired(name="restart/w"))) == ["w"]
    assert bench.actor.snapshot()["w"]["last_exit"] == "ended by SIGKILL"


def test_pauses_double_up_to_their_bound_and_a_healthy_spell_forgives() -> None:
    bench = Bench()
    pauses = []
    for _ in range(8):
        bench.send(ChildStarted(name="ingress-0", pid=13))
        effects = bench.send(ChildExited(name="ingress-0", pid=13, status=1))
        pauses += [e.at_ns - bench.now_ns for e in effects if isinstance(e, StartTimer)]
        bench.send(TimerFired(name="restart/ingress-0"))
    assert pauses[:3] == [BACKOFF_NS, 2 * BACKOFF_NS, 4 * BACKOFF_NS]
    assert pauses[-1] == BACKOFF_NS_MAX
    bench.send(ChildStarted(name="ingress-0", pid=13))
    bench.present("ingress-0", "ingress")
    bench.now_ns += HEALTHY_NS + 1
    effects = bench.send(ChildExited(name="ingress-0", pid=13, status=1))
    assert [e.at_ns - bench.now_ns for e in effects if isinstance(e, StartTimer)] == [BACKOFF_NS]


def test_a_worker_waits_for_a_zygote_that_is_down() -> None:
    bench = Bench()
    bench.all_ready()
    bench.send(ChildExited(name="zygote", pid=11, status=-9))
    bench.send(ChildExited(name="w", pid=12, status=-15))
    assert started(bench.send(TimerFired(name="restart/w"))) == []
    assert started(bench.send(TimerFired(name="restart/zygote"))) == ["zygote"]
    bench.send(ChildStarted(name="zygote", pid=21))
    assert started(bench.send(ChildReady(name="zygote"))) == ["w"]


def test_stopping_goes_in_order_and_ends_when_nothing_runs() -> None:
    bench = Bench()
    bench.all_ready()
    assert signalled(bench.send(StopRequested())) == [("ingress-0", signal.SIGTERM)]
    assert signalled(bench.send(ChildExited(name="ingress-0", pid=13, status=0))) == [("w", signal.SIGTERM)]
    assert signalled(bench.send(ChildExited(name="w", pid=12, status=0))) == [("zygote", signal.SIGTERM)]
    assert signalled(bench.send(ChildExited(name="zygote", pid=11, status=0))) == [("nats", signal.SIGTERM)]
    assert isinstance(bench.send(ChildExited(name="nats", pid=10, status=0))[-1], Stop)


def test_a_child_that_does_not_stop_in_time_is_killed() -> None:
    bench = Bench()
    bench.all_ready()
    effects = bench.send(StopRequested())
    kill_ns = bench.now_ns + INGRESS.stop_limit_ms * 1_000_000
    assert StartTimer(name="kill/ingress-0", at_ns=kill_ns) in effects
    assert signalled(bench.send(TimerFired(name="kill/ingress-0"))) == [("ingress-0", signal.SIGKILL)]


def test_asked_twice_it_kills_everything() -> None:
    bench = Bench()
    bench.all_ready()
    bench.send(StopRequested())
    killed = signalled(bench.send(StopRequested()))
    assert sorted(killed) == [(name, signal.SIGKILL) for name in ("ingress-0", "nats", "w", "zygote")]


def test_nothing_is_restarted_while_stopping() -> None:
    bench = Bench()
    bench.all_ready()
    bench.send(ChildExited(name="w", pid=12, status=1))
    bench.send(StopRequested())
    assert started(bench.send(TimerFired(name="restart/w"))) == []
    late = bench.send(ChildStarted(name="w", pid=14))
    assert signalled(late) == [("w", signal.SIGKILL)]


@pytest.mark.parametrize(
    ("options", "workers", "presences"),
    [
        ({"engine": "modelled", "instances": 64}, 1, 64),
        ({"engine": "modelled", "instances": 65}, 2, 65),
        ({"engine": "modelled", "instances": 1}, 1, 1),
        ({"engine": "vllm", "cores": [0, 1]}, 2, 2),
        ({"engine": "vllm", "cores": list(range(16))}, 4, 4),
        ({"engine": "vllm", "cores": [0], "instances": 2}, 2, 2),
    ],
)
def test_the_layout_has_as_many_engines_as_were_asked_for(
    options: dict[str, object], workers: int, presences: int
) -> None:
    config = Layout(msgspec.convert(options, UpOptions)).plan()
    found = [child for child in config.children if child.role == "worker"]
    assert len(found) == workers
    names = [name for child in found for name in child.presences]
    assert len(names) == len(set(names)) == presences


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ({"engine": "vllm", "cores": [0, 1]}, [["worker-0"], ["worker-1"]]),
        ({"engine": "modelled", "instances": 2}, [["worker-0-0", "worker-0-1"]]),
        ({"engine": "modelled", "instances": 2, "processes": 2}, [["worker-0"], ["worker-1"]]),
        ({"engine": "modelled", "instances": 1, "instances_max": 2}, [["worker-0", "worker-1"]]),
        ({"engine": "vllm", "cores": [0, 1], "migrators": False}, []),
    ],
)
def test_every_instance_that_may_run_has_one_migrator(options: dict[str, Any], groups: list[list[str]]) -> None:
    layout = Layout(msgspec.convert(options, UpOptions))
    config = layout.plan()
    found = [child.name for child in config.children if child.role == "migrator"]
    files = {
        path.stem: msgspec.json.decode(content) for path, content in layout._files.items() if path.suffix == ".json"
    }
    assert [files[name]["instances"] for name in found] == groups
    migrated = sorted(name for group in groups for name in group)
    workers = [spec for spec in [*config.children, *config.spares] if spec.role == "worker"]
    assert migrated in ([], sorted(name for spec in workers for name in spec.presences))


def test_migrators_outlive_the_workers_that_drain_through_them() -> None:
    children = Layout(UpOptions(engine="modelled", instances=2)).plan().children
    orders = {child.role: child.stop_order for child in children}
    assert orders["ingress"] < orders["worker"] < orders["migrator"]


@pytest.mark.parametrize("told", [{"step_time": "own.toml"}, {"modelled": {"coefficients": "own.toml"}}])
def test_predictors_read_the_step_times_that_workers_were_told_to_name(tmp_path: Path, told: dict[str, Any]) -> None:
    layout = Layout(UpOptions(directory=str(tmp_path), engine="modelled", instances=2, worker=told))
    layout.plan()
    layout.write()
    config = msgspec.json.decode((tmp_path / "run" / "predictor-0.json").read_bytes())
    assert config["step_times"] == {"own.toml": str(Path("own.toml").absolute())}


def test_a_worker_that_is_named_gets_settings_of_its_own_over_those_of_all(tmp_path: Path) -> None:
    told: dict[str, Any] = {"worker": {"max_num_seqs": 16, "migration": {"verify": True}}}
    told["workers"] = {"worker-1": {"max_num_seqs": 3, "step_time": "slow.toml", "migration": {"leases_max": 1}}}
    layout = Layout(msgspec.convert({"directory": str(tmp_path), "engine": "vllm", "cores": [0, 1], **told}, UpOptions))
    layout.plan()
    layout.write()
    first, second = (msgspec.json.decode((tmp_path / "run" / f"worker-{n}.json").read_bytes()) for n in (0, 1))
    assert (first["max_num_seqs"], second["max_num_seqs"]) == (16, 3)
    assert (first["migration"], second["migration"]) == ({"verify": True}, {"verify": True, "leases_max": 1})
    predictor = msgspec.json.decode((tmp_path / "run" / "predictor-0.json").read_bytes())
    assert list(predictor["step_times"]) == ["slow.toml"]


def test_settings_of_a_worker_that_there_is_not_are_refused_with_the_names_that_there_are() -> None:
    options = msgspec.convert({"engine": "modelled", "instances": 2, "workers": {"worker-1": {}}}, UpOptions)
    with pytest.raises(ConfigError, match=r"worker-1: no such worker; there are worker-0$"):
        Layout(options).plan()


def test_files_with_passwords_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    layout = Layout(UpOptions(directory=str(tmp_path), engine="modelled", instances=2))
    layout.plan()
    layout.write()
    files = list((tmp_path / "run").iterdir())
    assert len(files) >= 6
    assert {oct(file.stat().st_mode & 0o777) for file in files} == {"0o600"}


def test_every_process_gets_the_password_of_its_own_role_only(tmp_path: Path) -> None:
    layout = Layout(UpOptions(directory=str(tmp_path), engine="modelled", instances=2))
    layout.plan()
    layout.write()
    for role in (Role.INGRESS, Role.TAGGER, Role.COORDINATOR, Role.WORKER, Role.MIGRATOR):
        text = (tmp_path / "run" / f"{role}-0.json").read_text()
        inside = {other for other in Role if layout.passwords[other] in text}
        assert inside == {role}


@pytest.mark.parametrize(("field", "option"), [("port", "--port"), ("nats_port", "--nats-port")])
@pytest.mark.parametrize("port", [-1, 0, 65_536, 99_999])
def test_a_port_that_cannot_be_is_refused_by_its_option(field: str, option: str, port: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    options = UpOptions(directory=str(tmp_path), engine="modelled", model="m", model_path=str(tmp_path))
    options = msgspec.structs.replace(options, **{field: port})
    with pytest.raises(ConfigError, match=f"^{option} {port}: "):
        check(options)
