"""Runs a local cluster: nats-server first, then everything else under the supervisor's actor, until Ctrl-C or
SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from millrace.actor.clock import share, unix_ns
from millrace.actor.deps import ActorDeps, actor_rng
from millrace.actor.effects import Log
from millrace.actor.errors import BusError, ConfigError
from millrace.actor.nats_client import end_task
from millrace.actor.runtime_nats import ActorHandle, NatsRuntime
from millrace.cluster.reading import read_cluster
from millrace.cluster.spec import ClusterSpec
from millrace.contracts.local import StopRequested
from millrace.contracts.message import Body
from millrace.files import open_private, replace_file
from millrace.supervision.survivors import FILE, WrittenProcess, created, survivors, write_processes
from millrace.telemetry import Telemetry, open_telemetry

from services.supervisor.actor import ACCEPTS
from services.supervisor.build import build
from services.supervisor.causes import failure_cause
from services.supervisor.config import ChildSpec, LaunchOptions, SupervisorConfig
from services.supervisor.display import Display, banner, joined_banner, joining, open_api_warning
from services.supervisor.effects import (
    ChildExited,
    ChildStarted,
    ReadSpecification,
    SignalChild,
    SpecificationRead,
    StartChild,
)
from services.supervisor.launcher import ForkServers, Launcher, bound_logs, last_lines
from services.supervisor.layout import Layout
from services.supervisor.order_log import ACCEPTS as ORDER_TYPES
from services.supervisor.order_log import OrderLog, WriteOrder
from services.supervisor.preflight import (
    SOCKETS,
    AlreadyRunning,
    check,
    claim,
    clear_leftovers,
    clear_sockets,
    free_ports,
    last_end,
    socket_folder,
    store_folder,
)
from services.supervisor.probes import http_ready
from services.supervisor.rereading import CheckFiles, reread
from services.supervisor.store_guard import CHECK_S, StoreGuard

#: nats-server runs on so many times fewer cores than there are. Go keeps idle ones spinning for work: with two of two
#: it takes half as much time again for each message, from processes that have something to do, and delivers it later.
NATS_SHARE = 4
#: How long nats-server may take to say that it is well, seconds. It takes 0.1 s.
NATS_START_LIMIT_S = 15.0

#: A child that ended so often before it was ever ready will not come up: its configuration or its model is wrong.
START_FAILURES_MAX = 3

#: Lines of its log that are shown then where no exception says why, and those in which one is looked for.
LOG_LINES, LOG_LINES_READ = 12, 400

#: Every order that was given, a line of JSON each, below the cluster's folder.
ORDER_FILE = Path("run") / "orders.log"

#: Exit code of a start that Ctrl-C ended, as shells have it.
INTERRUPTED = 128 + signal.SIGINT

#: Looks after the store for each one after logs, sockets and the display.
LOOKS_BETWEEN = 5


class ToldSink:
    """Telemetry of the supervisor's actor, which logs what becomes of its children: calls ``told`` with each line."""

    def __init__(self, telemetry: Telemetry, told: Callable[[], None]) -> None:
        self.span = telemetry.span
        self._log = telemetry.log
        self._told = told

    def log(self, actor: str, effect: Log) -> None:
        self._log(actor, effect)
        self._told()


class Cluster:
    """The running supervisor of one cluster."""

    def __init__(
        self,
        config: SupervisorConfig,
        layout: Layout,
        fork_servers: ForkServers,
        check_files: CheckFiles,
        cores: list[int],
        started_ns: int,
        living: Sequence[WrittenProcess],
    ) -> None:
        """``living``: processes of an earlier supervisor, to be taken over."""
        self._config = config
        self._layout = layout
        self._check_files, self._cores, self._started_ns = check_files, cores, started_ns
        self._directory = Path(config.directory)
        self._launcher = Launcher(self._directory / "logs", self._notify, fork_servers)
        self._stores = [
            StoreGuard(config.bus, self._directory, child.name, index) for index, child in enumerate(config.nats)
        ]
        self._living = {each.spec["name"]: each for each in living}
        self._written: list[tuple[ChildSpec, int, bool]] = []
        self._changed = asyncio.Event()
        self._ended_by = 0
        self._handle: ActorHandle | None = None
        self._order_log: ActorHandle | None = None
        self._early: list[Body] = []
        incarnation = unix_ns()
        self._actor = build(config, ActorDeps(incarnation=incarnation, rng=actor_rng(config.name, incarnation)))

    async def run(self) -> int:
        """Brings everything up, stays, takes everything down; returns the exit code."""
        telemetry = self._telemetry = open_telemetry("supervisor", self._config.name, self._config.telemetry)
        title = f"starting {len(self._config.children)} processes"
        if self._living:
            title = f"taking over {len(self._living)} processes, which outlived their supervisor"
        try:
            with Display(self._actor.snapshot, title=title, logs=self._directory / "logs") as display:
                await self._start_nats()
                sink = ToldSink(telemetry, self._changed.set)
                runtime = NatsRuntime(
                    bus=self._config.bus, name=self._config.name, telemetry=sink, registry=telemetry.registry
                )
                await runtime.connect()
                self._handle = runtime.add(
                    self._actor,
                    accepts=ACCEPTS,
                    handlers={
                        StartChild: self._launcher.start,
                        SignalChild: self._signal,
                        ReadSpecification: self._read_specification,
                    },
                )
                if not self._layout.joins:
                    self._order_log = runtime.add(
                        OrderLog(self._config.bus.cluster),
                        accepts=ORDER_TYPES,
                        handlers={WriteOrder: self._write_order},
                    )
                self._adopt(runtime.now_ns())
                self._listen_for_signals()
                running = asyncio.create_task(runtime.run(signals=False))  # its own handlers
                looking = asyncio.create_task(self._look_after_machine())
                code = await self._until_ready(display, running)
                running.add_done_callback(lambda _: self._changed.set())
                while not running.done():
                    display.update()  # what dies and what comes back
                    self._write_down()
                    self._changed.clear()
                    await self._changed.wait()
            await end_task(looking)
            await running
            display.say("the cluster is down" if not self._layout.joins else "this machine has left the cluster")
            return code
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would be a traceback and end nothing sooner
            self._leave_nothing()
            for store in self._stores:
                await store.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                await end_task(task)  # of a client whose connect was cancelled: asyncio.run would cancel it once
            telemetry.close()

    def _leave_nothing(self) -> None:
        """Ends what runs where this ends before its time: an orderly end has left nothing."""
        early = [body.pid for body in self._early if isinstance(body, ChildStarted)]
        for pid in (*early, *(pid for _, pid, _ in self._actor.running())):
            self._launcher.signal(SignalChild(name="", pid=pid, signal=signal.SIGTERM))

    def _adopt(self, now_ns: int) -> None:
        for name, pid in self._nats_pids.items():
            self._actor.adopt(name, pid, now_ns)
        for name, each in self._living.items():
            spec = msgspec.convert(each.spec, ChildSpec)
            self._actor.adopt(name, each.pid, now_ns, spec, retiring=each.retiring)
            self._launcher.adopt(spec, each.pid)

    def _write_down(self) -> None:
        """For the next supervisor, where this one is killed."""
        running = self._actor.running()
        if running == self._written:
            return
        processes = (
            WrittenProcess(pid=pid, created=created(pid), spec=msgspec.to_builtins(spec), retiring=retiring)
            for spec, pid, retiring in running
        )
        with contextlib.suppress(OSError):  # a full disk: again with the next look
            write_processes(self._directory, processes)
            self._written = running

    async def _look_after_machine(self) -> None:
        for look in itertools.count():
            await asyncio.sleep(CHECK_S)
            for store in self._stores:
                self._notify(await store.check())
            if look % LOOKS_BETWEEN == 0:
                self._changed.set()  # whatever no line of the log told
                await asyncio.to_thread(self._tidy)

    def _tidy(self) -> None:
        clear_sockets(self._directory / "run" / SOCKETS, time.time())
        for folder in ("logs", "run"):
            bound_logs(self._directory / folder)

    def _signal(self, effect: SignalChild) -> None:
        self._launcher.signal(effect)
        self._changed.set()

    def _write_order(self, effect: WriteOrder) -> None:
        at = datetime.fromtimestamp(effect.at_ns / 1e9, UTC).isoformat(timespec="milliseconds")
        try:
            with open_private(self._directory / ORDER_FILE, "ab") as file:
                file.write(msgspec.json.encode({"time": at, **effect.fields}) + b"\n")
        except OSError as error:  # a full disk: then it is in this process's log, where that has room
            fields = {"error": str(error), **effect.fields}
            self._telemetry.log(self._config.name, Log(level="error", event="order_not_written", fields=fields))

    async def _until_ready(self, display: Display, running: asyncio.Task[str]) -> int:
        """Draws until the API answers, then says where it is; stops the cluster where that takes too long, unless
        processes of an earlier supervisor live: they serve.
        """
        deadline = time.monotonic() + self._config.ready_limit_s
        while not running.done():
            display.update()
            self._write_down()
            if self._all_ready() and (self._layout.joins or await http_ready(self._config.ingress_url)):
                self._say_ready(display)
                return 0
            broken = self._broken()
            if not self._living and (broken or time.monotonic() > deadline):
                display.say(self._failure_text(broken))
                self._stop()
                return 1
            await asyncio.sleep(0.05)
        return INTERRUPTED if self._ended_by == signal.SIGINT else 0

    def _all_ready(self) -> bool:
        return all(child["state"] in ("ready", "retiring") for child in self._actor.snapshot().values())

    def _say_ready(self, display: Display) -> None:
        display.update()
        display.__exit__(None, None, None)
        text = joined_banner(self._config.bus, self._directory, display.elapsed_s)
        if not self._layout.joins:
            api = self._layout.spec.api
            text = banner(
                url=self._config.ingress_url,
                page=self._layout.page_url,
                models=self._config.models,
                directory=self._directory,
                nats_url=self._config.bus.servers[0],
                took_s=display.elapsed_s,
                keys=bool(api.keys),
                objectives=self._layout.advised_objectives,
            )
            text += open_api_warning(api.host, keys=bool(api.keys)) + joining(self._layout.spec.nats, self._directory)
        replace_file(self._directory / "run" / "banner.txt", text.encode())  # `up --detach` reads it once it is there
        display.say(text + "Ctrl-C stops everything." if sys.stdout.isatty() else text)
        _tell_ready()

    def _broken(self) -> list[str]:
        """Children that do not come up."""
        children = self._actor.snapshot().items()
        return [name for name, child in children if child["start_failures"] >= START_FAILURES_MAX]

    def _failure_text(self, broken: list[str]) -> str:
        """Text that names each process that is not ready, and why; the end of its log where no exception says it."""
        children = self._actor.snapshot()
        late = broken or [name for name, child in children.items() if child["state"] != "ready"]
        if not late:
            return "every process is ready but the API does not answer"
        head = f"{', '.join(broken)} did not start" if broken else f"not ready after {self._config.ready_limit_s:.0f} s"
        lines = [f"{head}:"]
        for name in late:
            child, log = children[name], self._launcher.log_path(name)
            ended, said = child["last_exit"] or child["state"], last_lines(log, LOG_LINES_READ)
            if cause := failure_cause(said):
                lines.append(f"  {name}: {cause} ({ended}; its log is {log})")
                continue
            lines.append(f"  {name}: {ended}; {log} ends with")
            lines += [f"    {line}" for line in said[-LOG_LINES:]]
        return "\n".join(lines)

    async def _start_nats(self) -> None:
        for child in self._config.nats:
            if child.name not in self._living:
                self._launcher.start(StartChild(spec=child))
        for child, store in zip(self._config.nats, self._stores, strict=True):
            try:
                await store.wait_until_well(NATS_START_LIMIT_S)
            except BusError as error:
                raise BusError(f"{error}; its log is {self._launcher.log_path(child.name)}") from None
        self._nats_pids = {body.name: body.pid for body in self._early if isinstance(body, ChildStarted)}
        self._early.clear()

    def _notify(self, body: Body) -> None:
        self._changed.set()
        if isinstance(body, ChildExited):
            for store in (store for store in self._stores if store.name == body.name):
                store.put_aside(last_lines(self._launcher.log_path(store.name), 1))
        if self._handle is None:
            self._early.append(body)
        else:
            self._handle.deliver(body)

    def _read_specification(self, effect: ReadSpecification) -> None:
        try:
            running = {spec.name: spec for spec, _, _ in self._actor.running()}
            layout, config = reread(self._layout, self._cores, running, self._check_files)
        except (ConfigError, OSError) as error:
            self._notify(SpecificationRead(take=False, reply_to=effect.reply_to, refused=str(error)))
            return
        if effect.take:
            layout.write()
            self._layout = layout
            (self._directory / "run" / "cluster.json").write_bytes(layout.cluster_file(os.getpid(), self._started_ns))
        self._notify(SpecificationRead(take=effect.take, reply_to=effect.reply_to, machine=config))

    def _listen_for_signals(self) -> None:
        loop = asyncio.get_running_loop()
        hang_up = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []  # nohup ignores it
        for number in (signal.SIGINT, signal.SIGTERM, *hang_up):
            loop.add_signal_handler(number, self._stop, number)

    def _stop(self, number: int = 0) -> None:
        self._ended_by = self._ended_by or number
        self._launcher.end_starts()
        for handle in filter(None, (self._handle, self._order_log)):
            handle.deliver(StopRequested())


def _tell_ready() -> None:
    """Tells systemd, where it has started this process, that the cluster serves."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told, contextlib.suppress(OSError):
            told.sendto(b"READY=1", f"\0{address[1:]}" if address[0] == "@" else address)


#: Makes a cluster's fork servers, and ends them.
OpenServers = Callable[[ClusterSpec, Path], contextlib.AbstractContextManager[ForkServers]]


def main(check_files: CheckFiles, open_servers: OpenServers) -> int:
    """Reads what was asked for, checks that it can be had, and runs it.

    Args:
        check_files: Knows the services' configurations, which the supervisor itself does not.
        open_servers: Makes a cluster's fork servers, before there is a thread, a lock or a file that they would share.
    """
    parser = argparse.ArgumentParser(prog="python -m deployment.local_supervisor", description=__doc__)
    parser.add_argument("--options", required=True, help="JSON of LaunchOptions, as `millrace up` writes it")
    try:
        options = msgspec.json.decode(parser.parse_args().options.encode(), type=LaunchOptions)
        with open_servers(_in_force(options), Path(options.directory) / "logs") as fork_servers:
            return launch(options, check_files, fork_servers)
    except (AlreadyRunning, BusError, ConfigError, msgspec.ValidationError) as error:
        print(f"millrace up: {error}", file=sys.stderr)  # noqa: T201  # talks to the person who typed `up`
        return 1
    except KeyboardInterrupt:  # before the loop listens for signals: nothing was started
        print("millrace up: stopped before anything had started", file=sys.stderr)  # noqa: T201  # as above
        return INTERRUPTED


def _in_force(options: LaunchOptions) -> ClusterSpec:
    """The specification that will run: where processes outlived their supervisor, the one they were started by."""
    directory = Path(options.directory)
    return read_cluster(directory / "run" / "cluster.toml") if survivors(directory) else options.spec


def launch(options: LaunchOptions, check_files: CheckFiles, fork_servers: ForkServers) -> int:
    """Runs a cluster until it is told to stop; returns the exit code.

    Raises:
        AlreadyRunning, ConfigError: nothing was started. BusError: nats-server is not healthy.
    """
    directory = Path(options.directory)
    with contextlib.ExitStack() as stack:
        stack.enter_context(claim(directory))
        living = survivors(directory)
        spec = check(_in_force(options), free=(lambda host, port: True) if living or options.joins else None)
        if not living:
            if ended := last_end(directory):
                print(ended)  # noqa: T201  # to the person who typed `up`
            clear_leftovers(directory)
        stack.enter_context(store_folder(directory))
        os.environ.setdefault("VLLM_RPC_BASE_PATH", stack.enter_context(socket_folder(directory)))
        cores = options.cores or sorted(os.sched_getaffinity(0))
        os.environ.setdefault("GOMAXPROCS", str(max(1, len(cores) // NATS_SHARE)))
        if not living:
            spec = stack.enter_context(free_ports(spec))
        options = msgspec.structs.replace(options, spec=spec, cores=cores)
        layout = Layout.restored(options) if living else Layout(options)
        layout.clock_offset_ns = share(layout.clock_offset_ns)
        config = layout.plan()
        try:
            layout.write()
        except OSError as error:
            raise ConfigError(f"{directory} cannot be written: {error.strerror}") from None
        if not living:
            check_files(spec, layout.configurations())
        file = Path(config.directory) / "run" / "cluster.json"
        stack.callback(file.unlink, missing_ok=True)
        file.touch(mode=0o600)
        started_ns = unix_ns()
        file.write_bytes(layout.cluster_file(os.getpid(), started_ns))
        stack.callback((directory / FILE).unlink, missing_ok=True)
        return asyncio.run(Cluster(config, layout, fork_servers, check_files, cores, started_ns, living).run())
