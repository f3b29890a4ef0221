"""Changes the running cluster to what a file or settings say; no stream is cut.

    millrace apply --set policies.dispatch.name=join_shortest_queue
    millrace cluster show > cluster.toml      # the running cluster as a file; edit it
    millrace apply cluster.toml --dry-run     # what would change
    millrace apply cluster.toml
    millrace apply                            # replaces what an earlier Millrace has started

New processes start first. Instances that change are replaced one after the other: each drains as by `millrace drain`,
its requests move away with their KV, and it starts anew. Where their group has a free spare (`spares`) and there is a
device, that one starts before them and ends after them. An ingress that changes is replaced by another one on the same
port, and ends with its last stream. Other services start anew one by one. Ports, addresses and folders that the file
does not name stay as they are.

A model's first new instance, the spare if there is one, works for five seconds beside the unchanged ones before the
next drains. If a new process does not start, crashes, or takes far longer for a token, everything goes back to what ran
before. If the command is interrupted, run it again: it goes on from what it finds, with the same file or with another
one.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import fcntl
import time
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import IO

import msgspec
from nats.aio.client import Client

from millrace.actor.errors import ConfigError
from millrace.cli.bus import open_bus
from millrace.cli.cluster import (
    CLUSTER_FILE,
    ConnectionSettings,
    add_connection_options,
    folder_of,
    no_cluster,
    resolve_connection,
)
from millrace.cli.cluster_view import ClusterView
from millrace.cli.errors import CliError
from millrace.cli.listening import LISTEN_S, listen
from millrace.cli.operating import asked
from millrace.cli.trial_run import LOOK_S as TRIAL_LOOK_S
from millrace.cli.trial_run import SLOWER_MAX, TRIAL_S, TrialRun
from millrace.cluster.model_folders import with_model_folders
from millrace.cluster.reading import read_cluster
from millrace.cluster.settings import with_cluster_settings
from millrace.cluster.spec import ClusterSpec
from millrace.cluster.toml_text import cluster_toml
from millrace.cluster.workers import workers_of
from millrace.contracts.channels import Role
from millrace.contracts.coordinator import UNDER_WAY, OrderRefusal, OrderRefused
from millrace.contracts.message import Body
from millrace.contracts.provisioner import (
    ClusterCompared,
    ComparedProcess,
    InstanceOrdered,
    ProcessChange,
    StartInstance,
    StopInstance,
    UpdateCluster,
)
from millrace.contracts.subjects import Subjects
from millrace.files import open_private

SAME, CHANGED, ADDED, REMOVED = ProcessChange

#: A supervisor renders thousands of processes in less. Everything else it answers at once, where a nats-server that
#: starts anew does not lose the answer.
ANSWER_S, AT_ONCE_S = 30.0, 5.0

#: The bus may be away for so long: nats-server starts anew, or another one of several takes over.
AWAY_S = 60.0

#: A service starts in a second, on a loaded machine in ten; an engine may compile its model.
SERVICE_START_S, ENGINE_START_S = 60.0, 600.0

#: So often a process may end before it was ready: its configuration or its model is wrong.
START_FAILURES_MAX = 2

#: After its drain limit a worker lingers, ends, and is killed where it does not (the supervisor's stop limits).
GONE_GRACE_S = 30.0

LOOK_S = 0.1

#: Processes that a line names.
NAMES_SHOWN = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("file", metavar="FILE", nargs="?", help="the cluster's file; - reads it (default: as it runs)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="over the file")
    parser.add_argument("--dry-run", action="store_true", help="only show what would change")
    parser.add_argument(
        "--within", type=float, default=30.0, metavar="S", help="how long one instance may drain (default: 30)"
    )
    parser.add_argument(
        "--force", action="store_true", help="also where requests have nowhere to go, or tokens take far longer"
    )
    parser.add_argument("--reason", default="", metavar="TEXT", help="for the log of orders")
    parser.add_argument("--sender", default="", help=argparse.SUPPRESS)  # where no person applies
    add_connection_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Shows the difference, carries it out. A person waits for the autopilot's change, and it does not begin one beside
    a person's.
    """
    folder = folder_of(arguments.dir)
    if folder is None or not (folder / CLUSTER_FILE).is_file():
        raise no_cluster("apply FILE", arguments.dir)
    with open_private(folder / "run" / "apply.lock", "ab") as lock:
        take_turn(lock, person=not arguments.sender)
        return asyncio.run(apply(folder, arguments))


def take_turn(lock: IO[bytes], *, person: bool, sleep: Callable[[float], None] = time.sleep) -> None:
    """Take the lock of changes: persons share it, the autopilot has it alone and does not wait for it.

    Raises:
        CliError: somebody else's change is under way, and for a person has been for ENGINE_START_S.
    """
    for waited_s in range(int(ENGINE_START_S)):
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_NB | (fcntl.LOCK_SH if person else fcntl.LOCK_EX))
            return
        if not person:
            raise CliError(UNDER_WAY)
        if not waited_s:
            print(f"the autopilot is changing the cluster: waits for that, {ENGINE_START_S:g} s at most", flush=True)
        sleep(1.0)
    raise CliError(f"the autopilot's change has not ended in {ENGINE_START_S:g} s")


async def apply(folder: Path, arguments: argparse.Namespace) -> int:
    """Returns the exit code: 0 where the cluster in this folder is as the file says.

    Raises:
        CliError: the file is wrong, or the cluster cannot become so.
    """
    try:
        now = read_cluster(folder / "run" / "cluster.toml")
        base = read_cluster(arguments.file) if arguments.file is not None else now
        wanted = on_this_machine(with_model_folders(with_cluster_settings(base, arguments.set)), now)
    except ConfigError as error:
        raise CliError(str(error)) from None
    connection = resolve_connection(arguments, operator=True)
    async with listen(connection) as view, open_bus(connection) as bus:
        work = _Work(bus, connection, view, folder=folder, arguments=arguments)
        rows = await work.take(wanted, dry=True)
        text = difference(cluster_toml(now), cluster_toml(wanted), rows)
        print(text or "nothing changes\n", end="")
        if not text:
            return 0
        await asyncio.sleep(LISTEN_S)
        if others := [host for host in view.hosts(time.time_ns()) if host != connection.host]:
            print(f"other machines stay as they are ({', '.join(others)}); `millrace apply` there changes theirs")
        here = {instance for row in rows for instance in row.instances}
        ready = [row for row in view.instances(time.time_ns()) if row.state == "ready"]
        work.away = away = {row.model for row in ready if row.instance not in here}
        spared = {row.name for row in rows if any(alike(row.name, wanted).values())}
        if not arguments.force and (why := unsafe(rows, away, spared)):
            raise CliError(f"{why}; --force does it all the same")
        if arguments.dry_run:
            return 0
        return await _carried_out(work, now, wanted)


async def _carried_out(work: _Work, now: ClusterSpec, wanted: ClusterSpec) -> int:
    await work.take(wanted)
    try:
        await work.converge()
    except Unfit as failure:
        if wanted == now:  # another environment's, which has nothing else to start
            raise CliError(f"{failure}; what is not replaced yet stays as it is") from None
        print(f"{failure}; everything goes back to what ran before")
        await work.take(now)
        try:
            await work.converge(back=True)
        except Unfit as again:
            raise CliError(f"{again}, with the former specification too; `millrace status` shows what runs") from None
        raise CliError(f"{failure}; the cluster is as it was before") from None
    work.say("the cluster is as the file says")
    return 0


def on_this_machine(wanted: ClusterSpec, now: ClusterSpec) -> ClusterSpec:
    """With the addresses, ports and key file of the running cluster where the file names none."""

    def placed(table: str) -> msgspec.Struct:
        mine, running = getattr(wanted, table), getattr(now, table)
        default = type(mine)()
        names = [name for name in ("host", "port", "keys", "tls", "otlp", "metrics_port") if hasattr(mine, name)]
        unnamed = [name for name in names if getattr(mine, name) == getattr(default, name)]
        kept: msgspec.Struct = msgspec.structs.replace(mine, **{name: getattr(running, name) for name in unnamed})
        return kept

    return msgspec.structs.replace(wanted, **{table: placed(table) for table in ("api", "nats", "page", "telemetry")})


def difference(before: str, after: str, rows: Sequence[ComparedProcess]) -> str:
    """Lines of the two specifications that differ, and what becomes of processes; empty where nothing changes."""
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm=""))[2:]
    what = {ADDED: "starts", CHANGED: "starts anew", REMOVED: "ends"}
    changes = (row for row in rows if row.change is not SAME and (row.change, row.state) != (REMOVED, "retiring"))
    told = [f"{row.name:24} {_way(row, what[row.change])}" for row in changes]
    return "".join(f"{line}\n" for line in (*lines, *told) if not line.startswith("@@"))


def _way(row: ComparedProcess, what: str) -> str:
    if row.change is ADDED:
        return what
    if row.role == Role.WORKER:
        return f"drains and {what}"
    return f"{what} with its last stream" if row.role == Role.INGRESS else what


def alike(worker: str, spec: ClusterSpec) -> dict[str, bool]:
    """Names of the workers in one's group, its own among them, each with whether it is a spare."""
    slots = workers_of(spec)
    own = [(slot.model.name, slot.group) for slot in slots if slot.name == worker]
    return {slot.name: slot.spare for slot in slots if (slot.model.name, slot.group) in own}


def unsafe(rows: Iterable[ComparedProcess], away: Container[str] = (), spared: Container[str] = ()) -> str:
    """Reason why requests would be cut; empty where none would be.

    Args:
        away: Models that other machines serve too.
        spared: Workers that a spare may stand in for.
    """
    workers = [row for row in rows if row.role == Role.WORKER]
    for row in workers:
        if row.change in (CHANGED, REMOVED) and len(row.instances) > 1:
            return (
                f"{row.name} hosts {len(row.instances)} instances, which cannot drain alone: start the cluster with "
                "`--processes`, or `processes` of its group, as many as instances"
            )
    for model in sorted({row.serves for row in workers if row.change in (CHANGED, REMOVED) and row.serves not in away}):
        stay = [row for row in workers if row.model == model]
        if not stay:
            return f"no instance of {model} would be left: its requests have nowhere to go"
        if len(stay) == 1 and stay[0].serves == model and stay[0].change is CHANGED and stay[0].name not in spared:
            return f"{stay[0].name} is the only instance of {model}: its requests have nowhere to go; add one first"
    return ""


class Unfit(Exception):
    """A process of the new specification does not start, crashes, or takes far longer for a token."""


class _Work:
    """The steps from what runs to the specification in force.

    Attributes:
        away: Models that other machines serve too.
    """

    def __init__(
        self, bus: Client, to: ConnectionSettings, view: ClusterView, *, folder: Path, arguments: argparse.Namespace
    ) -> None:
        self._bus, self._subjects, self._host = bus, Subjects(to.cluster), to.host
        self._view, self._folder, self._within_s, self._force = view, folder, arguments.within, arguments.force
        self._reason, self._sender = arguments.reason, arguments.sender
        self.away: Container[str] = ()
        self._spec: ClusterSpec  # taken last
        self._spares: list[ComparedProcess] = []  # that stand in for changed instances
        self._began = time.monotonic()
        self._restarts: dict[str, float] = {}  # of each worker that was started, when it was ready

    def say(self, text: str) -> None:
        """Prints what happens, with the time since the start."""
        print(f"{time.monotonic() - self._began:8.1f} s  {text}", flush=True)

    async def take(self, spec: ClusterSpec, *, dry: bool = False) -> list[ComparedProcess]:
        """Puts a specification in force, or compares only.

        Raises:
            CliError: the supervisor refuses it.
        """
        self._spec = spec
        with open_private(self._folder / "run" / "wanted.toml", "wb") as file:
            file.write(cluster_toml(spec).encode())
        return await self._update(UpdateCluster(wanted=True, take=not dry, reason="" if dry else self._reason))

    async def converge(self, *, back: bool = False) -> None:
        """Every step; those that are done already do nothing.

        Args:
            back: To what ran before, which is not tried.

        Raises:
            Unfit: a process is not ready, or a changed one is not as good as it was.
        """
        self._restarts.clear()
        rows = await self._update(UpdateCluster())
        await self._services([row.name for row in _services(rows, ADDED)])
        for row in _services(rows, CHANGED):
            if row.role != Role.MIGRATOR:
                await self._services([row.name])
        ingresses = [row.name for row in _services(rows, REMOVED) if row.role == Role.INGRESS]
        await self._services(ingresses, gone=True)
        late = await self._start(added := _workers(rows, ADDED))
        added = [row for row in added if row not in late]
        spares = {row.name for row in self._spares}
        changed = [row for row in _workers(rows, CHANGED) if row.name not in spares]
        for model in dict.fromkeys(row.model for row in changed):
            await self._replace([row for row in changed if row.model == model], added, back=back)
        await self._end_spares()
        for row in _workers(await self._compared(), REMOVED):
            await self._stop(row, back=False)
        if await self._start(late):
            raise Unfit(f"{late[0].name} has no device")
        await self._services([row.name for row in _services(rows, CHANGED) if row.role == Role.MIGRATOR])
        await self._services([row.name for row in _services(rows, REMOVED) if row.role != Role.INGRESS], gone=True)
        rows = await self._update(UpdateCluster())
        await self._until_ready([row.name for row in rows if row.change is SAME], ENGINE_START_S)

    async def _replace(self, rows: Sequence[ComparedProcess], added: Iterable[ComparedProcess], *, back: bool) -> None:
        """A model's changed instances, one after the other. The first new one works for a while before the next drains:
        an added one, else a spare, else a changed one.
        """
        group = alike(rows[0].name, self._spec)
        new = [row for row in added if row.name in group][:1]
        if not new and not back:
            new = await self._stand_in(rows[0], [name for name, spare in group.items() if spare])
        tried = back or self._force
        for row in (*new, *rows):
            if row in rows:
                await self._stop(row, back=True)
                await self._start([row])
            if not tried:
                await self._try(row)
                tried = True
        await self._end_spares()

    async def _stand_in(self, changed: ComparedProcess, names: Iterable[str]) -> list[ComparedProcess]:
        """Starts the first free spare of these; none where there is none, or no device.

        Raises:
            Unfit: the changed one has requests that have nowhere to go then.
        """
        rows = {row.name: row for row in await self._compared()}
        drained = [row.instance for row in self._view.instances(time.time_ns()) if row.state == "drained"]
        taken = [*drained, *(row.name for row in rows.values() if row.change in (SAME, CHANGED))]
        for name in [name for name in names if name not in taken][:1]:
            if name in rows:  # a command that was interrupted has left it
                await self._stop(rows[name], back=False)
            self._spares = [ComparedProcess(name, Role.WORKER, ADDED, model=changed.model, instances=[name])]
            if not await self._start(self._spares) and self._serves(name):
                return self._spares
            self._spares = []
        if not self._force and (why := unsafe(rows.values(), self.away)):
            raise Unfit(f"no spare starts, and {why}")
        return []

    async def _end_spares(self) -> None:
        """Not as by an operator: they are free again."""
        while self._spares:
            await self._stop(self._spares.pop(), back=False)

    async def _services(self, names: list[str], *, gone: bool = False) -> None:
        if not names:
            return
        await self._update(UpdateCluster(processes=names))
        self.say(f"{_listed(names)} {'ends' if gone else 'starts'}")
        if not gone:
            await self._until_ready(names, SERVICE_START_S)

    async def _start(self, rows: Sequence[ComparedProcess]) -> list[ComparedProcess]:
        """Starts workers together; returns those that have no device yet."""
        late, names = [], []
        for row in rows:
            if row.state:  # it still drains
                await self._gone(row)
            order = StartInstance(order=f"apply-{time.time_ns()}", model=row.model, instance=row.instances[0])
            answer = await self._asked("start", order)
            if _refused(answer, OrderRefusal.NO_DEVICE):
                late.append(row)
            elif isinstance(answer, InstanceOrdered) or _refused(answer, OrderRefusal.RUNS):
                names.append(row.name)
                self._restarts[row.name] = inf
                self.say(f"{row.name} starts")
            else:
                raise Unfit(f"{row.name} is not started: {answer}")
        await self._until_ready(names, ENGINE_START_S)
        return late

    def _serves(self, instance: str) -> bool:
        row = self._view.instance(instance, time.time_ns())
        return row is not None and row.state == "ready"

    async def _stop(self, row: ComparedProcess, *, back: bool) -> None:
        for instance in row.instances:
            stop = StopInstance(instance=instance, drain_limit_ms=int(self._within_s * 1000), operator=back)
            answer = await self._asked("stop", stop)
            if not isinstance(answer, InstanceOrdered) and not _refused(answer, OrderRefusal.UNKNOWN_INSTANCE):
                raise CliError(f"{instance} is not drained: {answer}")
        self.say(f"{row.name} drains")
        await self._gone(row)

    async def _gone(self, row: ComparedProcess) -> None:
        until = time.monotonic() + self._within_s + GONE_GRACE_S
        while any(each.name == row.name and each.state and each.change is not SAME for each in await self._compared()):
            if time.monotonic() > until:
                raise CliError(f"{row.name} is still there; run `millrace apply` again to go on")
            await asyncio.sleep(LOOK_S)

    async def _until_ready(self, names: Sequence[str], limit_s: float) -> None:
        until = time.monotonic() + limit_s
        waits = set(names)
        while waits:
            await asyncio.sleep(LOOK_S)
            rows = [row for row in await self._compared() if row.name in waits]
            for row in rows:
                if row.failures >= START_FAILURES_MAX:
                    raise Unfit(f"{row.name} does not start ({row.detail}): {self._last_said(row.name)}")
                if row.state != "ready" or row.change is CHANGED:
                    continue
                if self._restarts.get(row.name) == inf:
                    self._restarts[row.name] = row.restarts
                if row.name not in self._restarts or all(map(self._serves, row.instances)):
                    waits.discard(row.name)
            there = {row.name for row in rows if row.state not in ("", "retiring")}
            waits -= self._restarts.keys() - there  # stopped by somebody else
            if not waits:
                self.say(f"{_listed(names)} ready")
            elif time.monotonic() > until:
                raise Unfit(f"{', '.join(sorted(waits))} not ready after {limit_s:g} s")

    async def _try(self, changed: ComparedProcess) -> None:
        """Lets a model's first changed instance work beside those that are as they were."""
        trial = TrialRun(changed.model, changed.instances)
        until = time.monotonic() + TRIAL_S
        while (now_s := time.monotonic()) < until:
            trial.look(self._view.instances(time.time_ns()), now_s)
            await asyncio.sleep(TRIAL_LOOK_S)
            await self._compared()
            if trial.idle:
                return
        if (slower := trial.slower()) is None:
            self.say(f"{changed.name} works; nothing compared its tokens with others'")
            return
        told = f"{changed.name} takes {slower:.1f} times as long for a token as those that are not changed"
        if slower >= SLOWER_MAX:
            raise Unfit(f"{told}; --force does it all the same")
        self.say(told)

    async def _compared(self) -> list[ComparedProcess]:
        """Every process.

        Raises:
            Unfit: a worker that was started has ended since it was ready.
        """
        rows = await self._update(UpdateCluster())
        for row in rows:
            if row.restarts > self._restarts.get(row.name, row.restarts):
                raise Unfit(f"{row.name} crashed ({row.detail}): {self._last_said(row.name)}")
        return rows

    def _last_said(self, name: str) -> str:
        log = self._folder / "logs" / f"{name}.log"
        lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
        return lines[-1] if lines else "it said nothing"

    async def _update(self, body: UpdateCluster) -> list[ComparedProcess]:
        answer = await self._asked("update", body)
        if not isinstance(answer, ClusterCompared):
            raise CliError(f"its supervisor does not answer: {answer}")
        if answer.refused:
            raise CliError(answer.refused)
        return answer.processes

    async def _asked(self, verb: str, body: Body) -> Body | str:
        """Every order may be repeated, and is while the bus is away."""
        until = time.monotonic() + AWAY_S
        subject = self._subjects.provision(self._host, verb)
        limit_s = ANSWER_S if isinstance(body, UpdateCluster) and body.wanted else AT_ONCE_S
        while isinstance(answer := await asked(self._bus, subject, body, timeout_s=limit_s, sender=self._sender), str):
            if time.monotonic() > until:
                break
            await asyncio.sleep(LOOK_S)
        return answer


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= NAMES_SHOWN else f"{names[0]} and {len(names) - 1} more:"


def _services(rows: Iterable[ComparedProcess], change: ProcessChange) -> list[ComparedProcess]:
    return [row for row in rows if row.role != Role.WORKER and row.change is change]


def _workers(rows: Iterable[ComparedProcess], change: ProcessChange) -> list[ComparedProcess]:
    return [row for row in rows if row.role == Role.WORKER and row.change is change]


def _refused(answer: Body | str, reason: OrderRefusal) -> bool:
    return isinstance(answer, OrderRefused) and answer.reason is reason
