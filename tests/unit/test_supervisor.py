"""The supervisor's actor and the layout of a local cluster."""

import asyncio
import itertools
import os
import signal
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from millrace.actor.effects import Effect, Publish, StartTimer, Stop, Subscribe, Unsubscribe
from millrace.actor.errors import ConfigError
from millrace.cluster.reading import parse_cluster
from millrace.cluster.settings import with_cluster_settings
from millrace.cluster.spec import ClusterSpec, NatsSpec
from millrace.contracts.catalog import Role
from millrace.contracts.local import StopRequested, TimerFired
from millrace.contracts.message import Body, Message
from millrace.contracts.status import PresenceState, ServicePresence
from millrace.files import open_private
from millrace.supervision.joining import TOKEN, read_token
from millrace.supervision.survivors import created

from services.supervisor.actor import (
    BACKOFF_NS,
    BACKOFF_NS_MAX,
    HEALTHY_NS,
    STORE_AGAIN_NS,
    STORE_PATIENCE_NS,
    SupervisorActor,
)
from services.supervisor.config import ChildSpec, Imports, Joined, LaunchOptions
from services.supervisor.display import Display, banner, joining, open_api_warning
from services.supervisor.effects import ChildExited, ChildStarted, MachineChecked, SignalChild, StartChild
from services.supervisor.launcher import _in_thread, bound_logs, last_lines
from services.supervisor.layout import JOINING, Layout
from services.supervisor.preflight import (
    SOCKET_FOLDER_BYTES_MAX,
    check,
    clear_leftovers,
    last_end,
    socket_folder,
    store_folder,
)
from services.supervisor.state import ChildState

NATS = ChildSpec(name="nats", role="nats", command=["nats-server"], stop_order=9)
WORKER = ChildSpec(name="w", role="worker", command=["worker"], presences=["w"], stop_order=2)
INGRESS = ChildSpec(name="ingress-0", role="ingress", command=["ingress"], presences=["ingress-0"], stop_order=1)


class Bench:
    """A supervisor over three children; nats-server runs already."""

    def __init__(self, *, leaves: bool = False) -> None:
        children = [NATS, WORKER, INGRESS]
        self.actor = SupervisorActor(
            name="supervisor", cluster="local", incarnation=1, children=children, leaves=leaves
        )
        self.now_ns = 1_000_000_000_000
        self.actor.adopt("nats", 10, self.now_ns)
        self.effects = self.actor.start(self.now_ns)

    def send(self, body: Body, *, after_ns: int = 0) -> list[Effect]:
        self.now_ns += after_ns
        effects = self.actor.handle(Message(body), self.now_ns)
        self.actor.check_invariants()
        return effects

    def present(self, name: str, role: str, incarnation: int | None = None) -> list[Effect]:
        incarnation = self.now_ns if incarnation is None else incarnation
        return self.send(ServicePresence(role=role, name=name, incarnation=incarnation, at_ns=self.now_ns))

    def all_ready(self) -> None:
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


@pytest.fixture
def bench() -> Bench:
    """One whose children are ready."""
    bench = Bench()
    bench.all_ready()
    return bench


def test_a_child_is_ready_with_its_presence_but_not_with_its_predecessors() -> None:
    bench = Bench()
    bench.send(ChildStarted(name="ingress-0", pid=13))
    bench.present("ingress-0", "ingress", incarnation=bench.now_ns - 1)
    assert bench.state("ingress-0") == "starting"
    bench.present("ingress-0", "ingress")
    assert bench.state("ingress-0") == "ready"


def test_presences_are_heard_only_while_a_child_starts(bench: Bench) -> None:
    heard = "mr.local.presence.*.*"
    assert Unsubscribe(subject=heard) in bench.send(TimerFired(name="tick"))
    bench.send(ChildExited(name="w", pid=12, status=1))
    assert bench.send(TimerFired(name="restart/w")) == [Subscribe(subject=heard), StartChild(spec=WORKER)]
    assert Unsubscribe(subject=heard) not in bench.send(TimerFired(name="tick"))


def test_a_child_that_ended_is_declared_dead_and_started_again_after_a_pause(bench: Bench) -> None:
    effects = bench.send(ChildExited(name="w", pid=12, status=-9, oom_kills=1))
    dead = [e.body for e in effects if isinstance(e, Publish)]
    assert [(b.name, b.state) for b in dead if isinstance(b, ServicePresence)] == [("w", PresenceState.DEAD)]
    timers = [e for e in effects if isinstance(e, StartTimer)]
    assert timers == [StartTimer(name="restart/w", at_ns=bench.now_ns + BACKOFF_NS)]
    assert started(bench.send(TimerFired(name="restart/w"))) == ["w"]
    assert bench.actor.snapshot()["w"]["last_exit"] == (
        "ended by SIGKILL; the kernel killed 1 process(es) for the memory limit of the control group"
    )


def test_failed_starts_are_counted_with_pauses_that_double_to_their_bound_until_a_healthy_spell() -> None:
    bench = Bench()
    pauses = []
    for _ in range(8):
        bench.send(ChildStarted(name="ingress-0", pid=13))
        effects = bench.send(ChildExited(name="ingress-0", pid=13, status=1))
        pauses += [e.at_ns - bench.now_ns for e in effects if isinstance(e, StartTimer)]
        bench.send(TimerFired(name="restart/ingress-0"))
    assert pauses[:3] == [BACKOFF_NS, 2 * BACKOFF_NS, 4 * BACKOFF_NS]
    assert pauses[-1] == BACKOFF_NS_MAX
    assert bench.actor.snapshot()["ingress-0"]["start_failures"] == 8
    bench.send(ChildStarted(name="ingress-0", pid=13))
    bench.present("ingress-0", "ingress")
    bench.now_ns += HEALTHY_NS + 1
    effects = bench.send(ChildExited(name="ingress-0", pid=13, status=1))
    assert [e.at_ns - bench.now_ns for e in effects if isinstance(e, StartTimer)] == [BACKOFF_NS]
    assert bench.actor.snapshot()["ingress-0"]["start_failures"] == 0


def test_a_child_that_is_killed_every_few_seconds_while_it_serves_is_back_as_soon_each_time(bench: Bench) -> None:
    pauses = []
    for pid in range(12, 24):
        bench.now_ns += 4_000_000_000
        effects = bench.send(ChildExited(name="w", pid=pid, status=-9))
        pauses += [e.at_ns - bench.now_ns for e in effects if isinstance(e, StartTimer)]
        bench.now_ns += BACKOFF_NS
        bench.send(TimerFired(name="restart/w"))
        bench.send(ChildStarted(name="w", pid=pid + 1))
        bench.now_ns += 1_300_000_000
        bench.present("w", "worker")
    assert pauses == [BACKOFF_NS] * 12


def test_stopping_goes_in_order_with_a_limit_for_each_and_ends_when_nothing_runs(bench: Bench) -> None:
    effects = bench.send(StopRequested())
    assert signalled(effects) == [("ingress-0", signal.SIGTERM)]
    assert StartTimer(name="kill/ingress-0", at_ns=bench.now_ns + INGRESS.stop_limit_ms * 1_000_000) in effects
    assert signalled(bench.send(TimerFired(name="kill/ingress-0"))) == [("ingress-0", signal.SIGKILL)]
    assert signalled(bench.send(ChildExited(name="ingress-0", pid=13, status=-9))) == [("w", signal.SIGTERM)]
    assert signalled(bench.send(ChildExited(name="w", pid=12, status=0))) == [("nats", signal.SIGTERM)]
    assert isinstance(bench.send(ChildExited(name="nats", pid=10, status=0))[-1], Stop)


def test_nothing_is_restarted_while_stopping_and_asked_twice_it_kills_everything(bench: Bench) -> None:
    bench.send(ChildExited(name="w", pid=12, status=1))
    bench.send(StopRequested())
    assert started(bench.send(TimerFired(name="restart/w"))) == []
    late = bench.send(ChildStarted(name="w", pid=14))
    assert signalled(late) == [("w", signal.SIGKILL)]
    killed = signalled(bench.send(StopRequested()))
    assert sorted(killed) == [(name, signal.SIGKILL) for name in ("ingress-0", "nats", "w")]


def cluster(*lines: str) -> ClusterSpec:
    """One model, one group; the lines go into its group, and behind a table's header wherever they want."""
    return parse_cluster("\n".join(['[[models]]\nname = "m"\npath = "/m"\n[[models.groups]]', *lines]))


def layout_of(spec: ClusterSpec, directory: Path | str = ".millrace", cores: tuple[int, ...] = (0, 1)) -> Layout:
    return Layout(LaunchOptions(spec=spec, directory=str(directory), cores=list(cores)))


def files_of(layout: Layout) -> dict[str, Any]:
    return {p.stem: msgspec.json.decode(content) for p, content in layout._files.items() if p.suffix == ".json"}


MODELLED = 'engine = "modelled"'


STAGED = [
    *("[[models.stages]]", 'name = "s0"', "length_max = 2048", 'instances = ["worker-0"]'),
    *("[[models.stages]]", 'name = "s1"', "length_min = 2048", 'instances = ["worker-[12]"]'),
]
RANGES = [
    {"length_min": 0, "length_max": 2048, "members": ["worker-0"], "instances": 1},
    {"length_min": 2048, "length_max": None, "members": ["worker-[12]"], "instances": 2},
]
RELIEF = ["[policies.provisioning]", 'name = "relief"', "parameters = { threshold_s = 2 }"]
BOUNDS = {"instances_min": 2, "instances_max": 3, "threshold_s": 2}
STEP_TIMES = {"step_times": {"own.toml": str(Path("own.toml").absolute())}}
OF_ALL = ["[settings.worker]", "max_num_seqs = 16", "block_size = 16", "migration = { verify = true }"]
OF_ONE = ["[settings.workers.worker-1]", "max_num_seqs = 3", "migration = { leases_max = 1 }"]
LAYERED = ["count = 2", "settings = { max_num_seqs = 8, seed = 1 }", *OF_ALL, *OF_ONE]


@pytest.mark.parametrize(
    ("lines", "service", "fields"),
    [
        (
            ["count = 3", *STAGED, "[policies.stages]", 'name = "exact"'],
            "coordinator-0",
            {"stages": {"policy": "exact", "ranges": {"m": RANGES}}},
        ),
        (
            [
                *(MODELLED, "[policies.dispatch]", 'name = "forecast"', "parameters = { fallback = 'round_robin' }"),
                *("[settings.ingress]", "dispatch = { wait_s = 3.0 }"),
            ],
            "ingress-0",
            {"dispatch": {"policy": "forecast", "parameters": {"fallback": "round_robin"}, "wait_s": 3.0}},
        ),
        ([MODELLED, "[policies.trading]", 'name = "delay"'], "broker-0", {"trading": {"policy": "delay"}}),
        (
            [MODELLED, "[settings.migrator]", "limits = { freeze_ms = 100 }"],
            "migrator-0",
            {"limits": {"freeze_ms": 100}},
        ),
        (
            [MODELLED, "count = 2", "spares = 1", 'host = "rack-1"', *RELIEF],
            "coordinator-0",
            {"provisioning": {"strategy": "relief", "parameters": BOUNDS, "hosts": ["rack-1"]}},
        ),
        ([MODELLED, "[settings.worker]", 'step_time = "own.toml"'], "predictor-0", STEP_TIMES),
        ([MODELLED, "[settings.worker]", 'modelled = { coefficients = "own.toml" }'], "predictor-0", STEP_TIMES),
        ([MODELLED, 'step_time = "own.toml"'], "predictor-0", STEP_TIMES),
        (LAYERED, "worker-0", {"max_num_seqs": 8, "seed": 1, "block_size": 16, "migration": {"verify": True}}),
        (LAYERED, "worker-1", {"max_num_seqs": 3, "migration": {"verify": True, "leases_max": 1}}),
    ],
)
def test_what_the_file_says_reaches_the_service_that_it_is_for(
    lines: list[str], service: str, fields: dict[str, Any]
) -> None:
    layout = layout_of(cluster(*lines))
    layout.plan()
    found = files_of(layout)[service]
    assert {name: found[name] for name in fields} == fields


def test_several_models_have_workers_of_their_own_and_one_ingress() -> None:
    first = '[[models]]\nname = "m"\npath = "/m/millrace-nano"\n[[models.groups]]\ncount = 2\n'
    second = '[[models]]\nname = "llama"\npath = "/llama"\n[[models.groups]]\ndevice = "h100"\n'
    layout = layout_of(parse_cluster(f'{first}{second}tensor_parallel = 2\nrole = "decode"'))
    config = layout.plan()
    workers = [child for child in config.children if child.role == "worker"]
    told = [(child.name, child.model, child.shape) for child in workers]
    assert told == [("worker-0", "m", "cpu"), ("worker-1", "m", "cpu"), ("worker-2", "llama", "h100x2")]
    assert {child.imports for child in workers} == {Imports.VLLM}
    files = files_of(layout)
    assert [files[child.name].get("engine_cores") for child in workers] == [[0], [1], None]
    assert files["ingress-0"]["models"] == [
        {"name": "m", "path": "/m/millrace-nano"},
        {"name": "llama", "path": "/llama"},
    ]
    assert (files["worker-1"]["model"], files["worker-1"]["step_time"]) == ("m", "cpu-500k")
    assert (files["worker-2"]["tensor_parallel_size"], files["worker-2"]["model_path"]) == (2, "/llama")
    assert "kv_bytes" not in files["worker-2"]
    assert files["coordinator-0"]["roles"] == {"worker-2": "decode"}
    assert config.models == ["m", "llama"]


@pytest.mark.parametrize(
    ("lines", "groups"),
    [
        (["count = 2"], [["worker-0"], ["worker-1"]]),
        ([MODELLED, "count = 2"], [["worker-0-0", "worker-0-1"]]),
        ([MODELLED, "count = 2", "processes = 2"], [["worker-0"], ["worker-1"]]),
        ([MODELLED, "count = 1", "spares = 1"], [["worker-0", "worker-1"]]),
        (["count = 2", "[services]", "migrators = false"], []),
    ],
)
def test_every_instance_that_may_run_has_one_migrator(lines: list[str], groups: list[list[str]]) -> None:
    layout = layout_of(cluster(*lines))
    config = layout.plan()
    found = [child.name for child in config.children if child.role == "migrator"]
    files = files_of(layout)
    assert {spec.name for spec in config.spares} <= set(files)
    assert [files[name]["instances"] for name in found] == groups
    migrated = sorted(name for group in groups for name in group)
    workers = [spec for spec in [*config.children, *config.spares] if spec.role == "worker"]
    assert migrated in ([], sorted(name for spec in workers for name in spec.presences))
    orders = {child.role: child.stop_order for child in config.children}
    assert orders["ingress"] < orders["worker"] < orders.get("migrator", 99)


@pytest.mark.parametrize(
    ("lines", "apart"),
    [
        (["count = 65"], {"predictor-0", "tagger-0"}),
        (["count = 2", "spares = 63"], {"predictor-0", "tagger-0"}),
        (["count = 2", "[services]", "hosted_instances_max = 1"], {"predictor-0", "tagger-0"}),
        (["[services]", "predictors = 2"], {"predictor-0", "predictor-1"}),
        (["[services]", "predictors = 0"], set()),
    ],
)
def test_many_instances_and_several_predictors_have_processes_of_their_own(lines: list[str], apart: set[str]) -> None:
    children = layout_of(cluster(MODELLED, *lines)).plan().children
    assert {child.name for child in children if child.role in ("predictor", "tagger")} == apart


def test_the_user_of_an_ingress_may_what_its_hosted_actors_may_and_others_what_they_could_before() -> None:
    def users(*lines: str) -> dict[str, str]:
        layout = layout_of(cluster(MODELLED, *lines))
        layout.plan()
        text = next(content.decode() for path, content in layout._files.items() if path.name == "nats.conf")
        return {block.partition(",")[0]: block for block in text.split("{ user: ")[1:]}

    hosted, apart = users(), users("[services]", "hosted_instances_max = 0")
    assert '"mr.local.status.*.*"' in hosted["ingress"]
    assert '"mr.local.status.*.*"' not in apart["ingress"]
    others = [
        {name: block.partition("permissions")[2] for name, block in each.items() if not name.startswith("ingress")}
        for each in (hosted, apart)
    ]
    assert others[0] == others[1]


def test_every_process_gets_the_password_of_its_own_role_only_in_a_file_for_its_owner(tmp_path: Path) -> None:
    layout = layout_of(cluster(MODELLED, "count = 2"), tmp_path)
    layout.plan()
    layout.write()
    with (tmp_path / "run" / "layout.json").open("rb") as held:
        layout.write()
        assert held.read(), "whoever is killed while it writes leaves half a file"
        assert os.fstat(held.fileno()).st_nlink == 0
    for role in (Role.INGRESS, Role.TAGGER, Role.COORDINATOR, Role.WORKER, Role.MIGRATOR):
        text = (tmp_path / "run" / f"{role}-0.json").read_text()
        assert {other for other in Role if layout.passwords[other] in text} == {role}
    assert {oct(file.stat().st_mode & 0o777) for file in (tmp_path / "run").iterdir()} == {"0o600"}


@pytest.mark.parametrize(
    ("files", "lines", "refusal"),
    [
        ({}, [], "port 8000 is taken by another program"),
        ({}, ['device = "h100"', "count = 2"], "several GPU engines on one machine need containers"),
        ({"config.json": "{"}, [], r"models\[0\].path: .*config.json: Expecting .*; a complete folder of a model is"),
        ({"tokenizer.json": '{"model": {'}, [], "tokenizer.json is no JSON object, or a part of one"),
        ({"tokenizer.json": None}, [], "No such file or directory: '.*tokenizer.json'; a complete folder"),
    ],
)
def test_what_cannot_run_on_this_machine_is_refused(
    tmp_path: Path, files: dict[str, str | None], lines: list[str], refusal: str
) -> None:
    for name, text in ({"config.json": "{}", "tokenizer.json": "{}"} | files).items():
        _ = text is None or (tmp_path / name).write_text(text)
    spec = cluster(MODELLED, *lines)
    spec = msgspec.structs.replace(spec, models=[msgspec.structs.replace(spec.models[0], path=str(tmp_path))])
    with pytest.raises(ConfigError, match=refusal):
        check(spec, lambda host, port: port != 8000)


@pytest.mark.parametrize(("text", "told"), [("", []), ("a\n\nb\nc\n", ["b", "c"]), ("x" * 99_999 + "\nlast", 2)])
def test_the_end_of_a_log_is_shown_and_no_more_of_it(tmp_path: Path, text: str, told: Any) -> None:
    log = tmp_path / "child.log"
    assert last_lines(log, 2) == []
    log.write_text(text)
    lines = last_lines(log, 2)
    assert lines == told if isinstance(told, list) else (len(lines) == told and len(lines[0]) < 70_000)


def test_a_log_that_grows_is_begun_anew_while_its_process_appends(tmp_path: Path) -> None:
    log, old = tmp_path / "child.log", tmp_path / "child.log.1"
    (tmp_path / "other.log").write_text("short")
    with open_private(log, "ab") as output:
        for number in range(10):
            output.write(b"%d" % number * 1000)
            output.flush()
            bound_logs(tmp_path, bytes_max=2500)
    assert {path.name for path in tmp_path.iterdir()} == {"child.log", "child.log.1", "other.log"}
    assert (old.read_text(), log.read_text()) == ("6" * 1000 + "7" * 1000 + "8" * 1000, "9" * 1000)
    assert old.stat().st_mode & 0o777 == 0o600


def test_a_long_start_says_what_it_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    children = {f"w{number}": {"state": ChildState.STARTING, "last_exit": ""} for number in range(6)}
    clock_s = itertools.count(step=0.25).__next__
    display = Display(lambda: children, title="starting", logs=Path("logs"), clock_s=clock_s)
    while display.elapsed_s < 25:
        display.update()
    children["w5"]["state"] = ChildState.STOPPING  # Ctrl-C before the start is over
    while display.elapsed_s < 35:
        display.update()
    said = [line.partition(" s ")[2] for line in capsys.readouterr().out.splitlines()]
    assert said == [*[" waiting for w0, w1, w2, w3 and 2 more; logs: logs"] * 2, " stopping w5; logs: logs"]
    display.__exit__()
    while display.elapsed_s < 50:
        display.update()
    assert not capsys.readouterr().out


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "127.0.0.1", "localhost"])
def test_an_api_open_to_others_without_keys_is_warned_of(host: str) -> None:
    text = open_api_warning(host, keys=False)
    assert ("WARNING" in text and host in text and "--keys" in text) is (host not in ("127.0.0.1", "localhost"))
    assert "WARNING" not in open_api_warning(host, keys=True)


@pytest.mark.parametrize(("host", "tls", "shown"), [("0.0.0.0", "", "THIS_MACHINE"), ("10.0.0.7", "certs", "10.0.0.7")])
def test_how_other_machines_join_is_shown_in_full(host: str, tls: str, shown: str) -> None:
    first, *rest = joining(NatsSpec(host=host, tls=tls), Path("c")).splitlines()
    assert f"millrace join nats://{shown}:4222 --token @" in first
    assert (first.endswith(" --set nats.tls=certs"), bool(rest)) == (bool(tls), not tls)


@pytest.mark.parametrize(
    ("settings", "objectives"),
    [
        ([], "5 times the latencies of a request that is alone"),
        (["autopilot=off"], ""),
        (["step_bounds.ttft_s=2"], "5 times the latencies of a request that is alone"),  # off
        (["step_bounds.tpot_s=0.02"], "TTFT 3000 ms and TPOT 20 ms (coordinator.step_bounds)"),
        (
            ["step_bounds.tpot_s=0.02", "stages.parameters.bounds={ttft_ms=200,tpot_ms=30}"],
            "TTFT 200 ms and TPOT 30 ms (policies.stages.parameters.bounds)",
        ),
        (
            ["step_bounds.tpot_s=0.02", "stages.parameters.bounds=7"],  # a policy of one's own
            "TTFT 3000 ms and TPOT 20 ms (coordinator.step_bounds)",
        ),
    ],
)
def test_the_start_says_what_objectives_the_autopilot_advises_for(settings: list[str], objectives: str) -> None:
    spec = with_cluster_settings(cluster(MODELLED), [f"coordinator.{each}" for each in settings])
    found = layout_of(spec).advised_objectives
    assert found == objectives
    shown = {"url": "u", "page": "", "models": ["m"], "directory": Path("d"), "nats_url": "n", "took_s": 1.0}
    text = banner(**shown, keys=False, objectives=found)
    lines = [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith("  advice ")]
    assert lines == ([f"in status, after minutes of load; objectives: {objectives}"] if objectives else [])


@pytest.mark.parametrize("folder", ["", "x" * 100])
def test_vllm_s_sockets_lie_in_a_folder_that_goes_with_the_cluster(tmp_path: Path, folder: str) -> None:
    with socket_folder(tmp_path / folder) as name:
        (Path(name) / "some-socket").touch()
        assert len(name) <= SOCKET_FOLDER_BYTES_MAX
        assert Path(name).stat().st_mode & 0o077 == 0
    assert not Path(name).exists()


def test_what_lies_outside_of_a_killed_cluster_s_folder_is_cleared_at_the_next_start(tmp_path: Path) -> None:
    with store_folder(tmp_path / "c"), socket_folder(tmp_path / "c" / ("x" * 100)) as sockets:
        links = [tmp_path / "c" / "jetstream", tmp_path / "c" / ("x" * 100) / "run" / "ipc"]
        folders = [link.readlink() for link in links]
        assert folders[1] == Path(sockets)
        for link in links:
            (link / "left").touch()
        clear_leftovers(tmp_path / "c")
        clear_leftovers(tmp_path / "c" / ("x" * 100))
        assert not [path for path in (*links, *folders) if path.exists()]


def test_a_link_to_somebody_s_folder_is_removed_and_the_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "jetstream").symlink_to(tmp_path / "mine")
    clear_leftovers(tmp_path)
    assert (tmp_path / "mine").is_dir()
    assert not (tmp_path / "jetstream").is_symlink()


def ill(*, room: bool = True) -> MachineChecked:
    return MachineChecked(store="write error", room=room, disk="" if room else "no space is left")


def told(bench: Bench) -> tuple[str, str]:
    """Trouble, and trouble of the store, in the supervisor's next presence."""
    (presence,) = [effect.body for effect in bench.send(TimerFired(name="tick")) if isinstance(effect, Publish)]
    return presence.trouble, presence.store


def test_a_store_that_stays_ill_has_nats_started_anew_and_not_again_at_once() -> None:
    bench = Bench()
    assert not signalled(bench.send(ill()))
    assert signalled(bench.send(ill(), after_ns=STORE_PATIENCE_NS)) == [("nats", signal.SIGKILL)]
    bench.send(ChildExited(name="nats", pid=10, status=-9))
    bench.send(TimerFired(name="restart/nats"))
    bench.send(ChildStarted(name="nats", pid=77))
    assert not signalled(bench.send(ill(), after_ns=STORE_PATIENCE_NS))
    assert signalled(bench.send(ill(), after_ns=STORE_AGAIN_NS)) == [("nats", signal.SIGKILL)]


def test_a_store_without_room_is_left_alone_and_status_is_told_why() -> None:
    bench = Bench()
    bench.send(ill(room=False))
    assert not signalled(bench.send(ill(room=False), after_ns=10 * STORE_PATIENCE_NS))
    assert told(bench) == ("no space is left; JetStream takes no writes: write error", "write error")
    bench.send(MachineChecked(store="", room=True, disk=""))
    assert told(bench) == ("", "")
    bench.send(ill())
    bench.send(ill())  # as while a group of servers has no leader: nothing that lasts
    assert told(bench) == ("JetStream takes no writes: write error", "")


def test_a_cluster_that_was_not_stopped_in_order_is_told_of_at_the_next_start(tmp_path: Path) -> None:
    assert last_end(tmp_path) == ""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "cluster.json").write_bytes(layout_of(cluster(MODELLED), tmp_path).cluster_file(4711, 10**18))
    note = "started here at 2001-09-09 01:46:40 UTC (supervisor pid 4711) was not stopped in order"
    assert note in last_end(tmp_path)
    clear_leftovers(tmp_path)
    assert last_end(tmp_path) == ""


def test_a_process_is_known_again_after_the_system_s_clock_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    before = created(os.getpid())
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: 0.0)  # Linux computes it from the clock
    assert before
    assert created(os.getpid()) == before
    assert created(2**22) == ""  # no pid is that high


def test_who_leaves_a_cluster_drains_its_workers_before_anything_stops() -> None:
    bench = Bench(leaves=True)
    bench.all_ready()
    effects = bench.send(StopRequested())
    assert [effect.subject for effect in effects if isinstance(effect, Publish)] == ["mr.local.engine.w.drain"]
    assert signalled(effects) == []
    assert signalled(bench.send(ChildExited(name="w", pid=12, status=0))) == [("ingress-0", signal.SIGTERM)]
    bench.send(ChildExited(name="ingress-0", pid=13, status=0))
    assert isinstance(bench.send(ChildExited(name="nats", pid=10, status=0))[-1], Stop)


def test_who_is_asked_again_leaves_at_once() -> None:
    bench = Bench(leaves=True)
    bench.all_ready()
    bench.send(StopRequested())
    assert signalled(bench.send(StopRequested())) == [("ingress-0", signal.SIGTERM)]
    assert signalled(bench.send(ChildExited(name="ingress-0", pid=13, status=0))) == [("w", signal.SIGTERM)]


def test_a_machine_that_joins_runs_engines_and_what_moves_their_sequences(tmp_path: Path) -> None:
    spec = cluster(MODELLED, 'name = "b-worker"')
    first = layout_of(msgspec.structs.replace(spec, nats=NatsSpec(host="0.0.0.0")), tmp_path)
    first.plan()
    first.write()
    told = (first.run_dir / TOKEN).read_text()
    assert set(read_token(told).passwords) == set(JOINING)
    with pytest.raises(ConfigError, match="no token"):
        read_token(told[:-5])
    (tmp_path / "b/run").mkdir(parents=True)
    (tmp_path / "b/run" / TOKEN).write_text(told)
    joins = Joined(name="b", servers=["nats://a:4222"])
    config = Layout(LaunchOptions(spec=spec, directory=str(tmp_path / "b"), joins=joins)).plan()
    assert (config.nats, config.name, config.host, config.leaves) == ([], "b-supervisor", "b", True)
    assert [child.presences for child in config.children] == [["b-worker-0"], ["b-migrator-0"]]
    real = Layout(LaunchOptions(spec=cluster(), directory=str(tmp_path / "b"), cores=[0], joins=joins))
    real.plan()
    real.write()
    worker = msgspec.json.decode((tmp_path / "b/run/worker-0.json").read_bytes())
    assert worker["migration"]["copiers"] == ["shared_memory", "nixl"]
    assert (config.bus.servers, config.bus.password) == (joins.servers, first.passwords[Role.SUPERVISOR])


async def test_a_wait_for_a_child_that_was_cancelled_takes_no_status() -> None:
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    gate, threads = threading.Event(), set(threading.enumerate())
    wait = asyncio.create_task(_in_thread(gate.wait, "wait"))
    await asyncio.sleep(0)
    wait.cancel()
    (thread,) = set(threading.enumerate()) - threads
    gate.set()
    await asyncio.to_thread(thread.join)
    await asyncio.sleep(0)
    assert not complaints


@pytest.mark.parametrize(("settings", "drain_s"), [([], 8), (["ingress.limits.drain_s=20"], 20)])
def test_open_calls_get_their_error_before_an_ingress_is_killed(
    tmp_path: Path, settings: list[str], drain_s: int
) -> None:
    layout = layout_of(with_cluster_settings(cluster(MODELLED), settings), tmp_path)
    ingress = next(child for child in layout.plan().children if child.role == Role.INGRESS)
    layout.write()
    written = msgspec.json.decode((tmp_path / "run" / "ingress-0.json").read_bytes())
    assert (written["limits"]["drain_s"], ingress.stop_limit_ms) == (drain_s, 1000 * drain_s + 2000)
