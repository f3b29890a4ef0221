"""Takes an instance out of service: no new requests; running ones move to other instances with their KV.

The supervisor of the instance's process (`millrace up`, or the provisioner beside docker compose) drains it: running
requests move, those left at the limit are handed back to ingress (how many, and why they did not move, is printed),
the process ends, and it is not restarted. --back starts it again. If no supervisor manages the instance, the worker
itself is asked to drain and end; whatever started it may restart it.

The last ready instance of a model is drained only with --force: its requests cannot continue anywhere and fail. A
drained instance stays in `millrace status`, and provisioning does not start it again.

With --keep its requests move away, but the instance stays in service and gets new requests.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

from nats.aio.client import Client

from millrace.cli.bus import open_bus
from millrace.cli.cluster import ConnectionSettings, add_connection_options, resolve_connection
from millrace.cli.cluster_rows import InstanceRow
from millrace.cli.cluster_view import ClusterView
from millrace.cli.errors import CliError
from millrace.cli.listening import LISTEN_S, listen
from millrace.cli.operating import asked, headers_of
from millrace.contracts.codec import encode
from millrace.contracts.coordinator import OrderRefusal, OrderRefused
from millrace.contracts.message import Body
from millrace.contracts.migration import EvacuateInstance, InstanceEvacuated
from millrace.contracts.provisioner import InstanceOrdered, StartInstance, StopInstance
from millrace.contracts.subjects import Subjects
from millrace.contracts.worker import DrainWorker


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("instance", metavar="INSTANCE", help="see `millrace status`")
    parser.add_argument(
        "--within", type=float, default=10.0, metavar="S", help="how long moving and decoding may take (default: 10)"
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--keep", action="store_true", help="only move what runs there; it stays in service")
    group.add_argument("--back", action="store_true", help="start an instance that was drained")
    parser.add_argument("--force", action="store_true", help="also the last instance of its model")
    parser.add_argument("--host", help="name of its machine's supervisor (default: whoever keeps it)")
    add_connection_options(parser)


#: Provisioners answer at once.
ANSWER_S = 2.0

#: After the limit a worker lingers for finished sequences, ends, and its process is seen to be gone.
GRACE_S = 8.0

#: What is left is said so long before it is handed back, or after half of a short limit: the worker asks likewise.
LEFT_S = 0.25

#: The answer on what is left is waited for so long after the instance is gone.
SAID_S = 1.0

#: A drained instance takes so long to be back, at most: a large model is read from disk, and compiled.
START_S = 600.0

LOOK_S = 0.1


async def run(arguments: argparse.Namespace) -> int:
    """Returns the exit code: 0 where the instance is empty, gone, or back."""
    connection = resolve_connection(arguments, operator=True)
    subjects = Subjects(connection.cluster)
    async with listen(connection) as view:
        await asyncio.sleep(LISTEN_S)
        row = view.instance(arguments.instance, time.time_ns())
        if arguments.back:
            return await _bring_back(connection, subjects, view, arguments)
        if row is None or row.state in ("dead", "drained"):
            raise CliError(f"no instance {arguments.instance} runs; `millrace status` shows which do")
        if not arguments.keep:
            spare_the_last(view.instances(time.time_ns()), row, force=arguments.force)
        async with open_bus(connection) as bus:
            if arguments.keep:
                return await _evacuate(bus, subjects, arguments)
            print(f"{arguments.instance}: {row.running} running, {row.waiting} waiting")
            until = time.monotonic() + arguments.within
            await _let_go(bus, subjects, view, arguments)
            saying = asyncio.create_task(_say_left(bus, subjects, arguments.instance, until - time.monotonic()))
            gone = await _until_gone(view, arguments)
            await asyncio.wait([saying], timeout=SAID_S)
            saying.cancel()
            return gone


def spare_the_last(rows: list[InstanceRow], row: InstanceRow, *, force: bool) -> None:
    """Refuses to drain the last ready instance of a model, or warns where that is forced.

    Raises:
        CliError: it is the last one.
    """
    others = [each for each in rows if each.model == row.model and each.instance != row.instance]
    if row.state != "ready" or any(each.state == "ready" for each in others):
        return
    what = f"{row.instance} is the last ready instance of {row.model}: its {row.running + row.waiting} requests"
    if not force:
        raise CliError(f"{what} have nowhere to go, and new ones would fail; --force drains it all the same")
    print(f"warning: {what} have nowhere to go; they and new ones fail until --back", file=sys.stderr)


async def _evacuate(bus: Client, subjects: Subjects, arguments: argparse.Namespace) -> int:
    body = EvacuateInstance(limit_ms=int(arguments.within * 1000))
    subject = subjects.migrate(arguments.instance, "evacuate")
    answer = await asked(bus, subject, body, timeout_s=arguments.within + GRACE_S)
    if not isinstance(answer, InstanceEvacuated):
        raise CliError(f"its broker does not empty {arguments.instance}: {_why(answer)}")
    print(evacuated_text(arguments.instance, answer))
    return 0 if not answer.left else 1


async def _say_left(bus: Client, subjects: Subjects, instance: str, limit_s: float) -> None:
    """Prints what its broker moved and what it leaves; the worker has asked it for the same."""
    limit_s = max(limit_s - LEFT_S, limit_s / 2, 0.0)
    body = EvacuateInstance(limit_ms=int(limit_s * 1000))
    answer = await asked(bus, subjects.migrate(instance, "evacuate"), body, timeout_s=limit_s + GRACE_S)
    if isinstance(answer, InstanceEvacuated):
        print(evacuated_text(instance, answer) + ("; handed back to ingress at the limit" if answer.left else ""))
    else:
        print(f"{instance}: nothing moves ({_why(answer)}); what runs at the limit is handed back to ingress")


def evacuated_text(instance: str, answer: InstanceEvacuated) -> str:
    """Say what became of the requests of an instance that was emptied, and why some are left."""
    text = f"{instance}: {answer.moved} moved"
    text += f", {answer.failed} attempts failed" if answer.failed else ""
    left = "; ".join(f"{count} {why}" for why, count in sorted(answer.left.items()))
    return f"{text}, {sum(answer.left.values())} left ({left})" if left else f"{text}, none left"


async def _keeper(
    bus: Client, subjects: Subjects, view: ClusterView, arguments: argparse.Namespace, verb: str, body: Body
) -> Body | str:
    """Answer of the supervisor that keeps the instance; of the last one that was asked where none does."""
    answer: Body | str = "no supervisor is heard"
    for host in [arguments.host] if arguments.host else view.hosts(time.time_ns()):
        answer = await asked(bus, subjects.provision(host, verb), body, timeout_s=ANSWER_S)
        if not isinstance(answer, str) and not _is_unknown(answer):
            break
    return answer


def _is_unknown(answer: Body) -> bool:
    return isinstance(answer, OrderRefused) and answer.reason is OrderRefusal.UNKNOWN_INSTANCE


async def _let_go(bus: Client, subjects: Subjects, view: ClusterView, arguments: argparse.Namespace) -> None:
    """By whoever keeps it, so that it stays away; else by the worker itself."""
    limit_ms = int(arguments.within * 1000)
    stop = StopInstance(instance=arguments.instance, drain_limit_ms=limit_ms, operator=True)
    answer = await _keeper(bus, subjects, view, arguments, "stop", stop)
    if isinstance(answer, InstanceOrdered):
        print(f"it drains and will stay away; `millrace drain {arguments.instance} --back` starts it again")
        return
    if isinstance(answer, OrderRefused) and answer.reason is OrderRefusal.SHARED_PROCESS:
        raise CliError(
            f"{answer.detail}, so it cannot go alone; --keep empties it, `millrace up --processes N` splits them"
        )
    print(f"no supervisor keeps it ({_why(answer)}): the worker is asked; what started it may start it again")
    body = DrainWorker(limit_ms=limit_ms)
    await bus.publish(subjects.engine(arguments.instance, "drain"), encode(body), headers=headers_of(body))
    await bus.flush()


async def _until_gone(view: ClusterView, arguments: argparse.Namespace) -> int:
    row = view.instance(arguments.instance, time.time_ns())
    incarnation_s = row.uptime_s if row is not None else 0.0
    until = time.monotonic() + arguments.within + GRACE_S
    shown = ""
    while time.monotonic() < until:
        row = view.instance(arguments.instance, time.time_ns())
        # A younger process is another one: somebody has started it again already.
        if row is None or row.state in ("dead", "drained", "suspect") or row.uptime_s < incarnation_s:
            print(f"{arguments.instance} is gone")
            return 0
        incarnation_s = max(incarnation_s, row.uptime_s)
        text = f"{arguments.instance} {row.state}: {row.running} running, {row.waiting} waiting"
        if text != shown and row.state == "draining":
            print(text)
            shown = text
        await asyncio.sleep(LOOK_S)
    print(f"{arguments.instance} is still there after {arguments.within + GRACE_S:g} s")
    return 1


async def _bring_back(
    connection: ConnectionSettings, subjects: Subjects, view: ClusterView, arguments: argparse.Namespace
) -> int:
    order = StartInstance(order=f"operator-{time.time_ns()}", model="", instance=arguments.instance)
    async with open_bus(connection) as bus:
        answer = await _keeper(bus, subjects, view, arguments, "start", order)
    if not isinstance(answer, InstanceOrdered):
        raise CliError(f"{arguments.instance} is not started: {_why(answer)}")
    print(f"{answer.instance} starts")
    began = time.monotonic()
    while (waited_s := time.monotonic() - began) < START_S:
        row = view.instance(answer.instance, time.time_ns())
        # An older process is the one that was drained.
        if row is not None and row.state == "ready" and row.uptime_s < waited_s + ANSWER_S:
            print(f"{answer.instance} is ready")
            return 0
        await asyncio.sleep(LOOK_S)
    print(f"{answer.instance} is not ready after {START_S:g} s")
    return 1


def _why(answer: Body | str) -> str:
    if isinstance(answer, str):
        return answer
    if isinstance(answer, OrderRefused):
        return f"{answer.reason}: {answer.detail}"
    return f"{answer.type_name()} {getattr(answer, 'detail', '')}".strip()
