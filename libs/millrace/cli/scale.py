"""Starts or stops instances of a model, until COUNT serve.

COUNT is a number, or a change such as +1 or -1. With --shape, only instances of that device kind and tensor parallel
size count (`cpu`, `h100x2`); with --role, only those of that role. Instances that are started get both. By default all
instances of the model count.

The model's coordinator asks the supervisor, or the provisioner beside docker compose, to start spare instances: those
of `millrace up --instances 2 --instances-max 4`, or `spares` of a group in a cluster's file. It stops those with the
least KV to move. They take no new requests; their running requests move away with their KV, those with the longest
predicted remainder first. Requests that are left at the printed time limit continue elsewhere by recompute.

The order is refused, with the reason, if a stage would have no instance for prefill or for decode, if no provisioner
has the shape or a free device, if the plan has changed since the command read it, while instances are being started or
stopped, and for 30 s after a change of roles. A provisioning policy (`--provision`) continues from the new number by
its own rules.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence

from millrace.cli.bus import open_bus
from millrace.cli.cluster import add_connection_options, resolve_connection
from millrace.cli.cluster_rows import InstanceRow
from millrace.cli.cluster_view import ClusterView
from millrace.cli.errors import CliError
from millrace.cli.listening import LISTEN_S, listen
from millrace.cli.operating import asked
from millrace.cli.role import taken
from millrace.contracts.coordinator import OrderAccepted, SetInstances
from millrace.contracts.plan import InstanceRole
from millrace.contracts.subjects import Subjects


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("model", metavar="MODEL", help="its served name")
    parser.add_argument("count", metavar="COUNT", type=count, help="instances to run: 3, +1 or -1")
    parser.add_argument("--shape", default="", help="device kind and tensor parallel size: cpu, h100x2 (default: all)")
    parser.add_argument("--role", choices=[str(role) for role in InstanceRole], help="(default: all)")
    parser.add_argument(
        "--limit", type=float, default=180.0, metavar="S", help="how long to wait for instances (default: 180)"
    )
    parser.add_argument("--detach", action="store_true", help="return once the order is taken")
    add_connection_options(parser)


#: A coordinator asks each provisioner twice, for two seconds each.
ANSWER_S = 10.0

LOOK_S = 0.1

#: After the limit a worker lingers, ends, and its process is seen to be gone.
GRACE_S = 10.0


async def run(arguments: argparse.Namespace) -> int:
    """Returns the exit code: 0 where as many serve as asked for, or the order was taken with --detach.

    Raises:
        CliError: Nobody serves the model, or the coordinator refuses.
    """
    connection = resolve_connection(arguments, operator=True)
    async with listen(connection) as view, open_bus(connection) as bus:
        await asyncio.sleep(LISTEN_S)
        rows = [row for row in view.instances(time.time_ns()) if row.model == arguments.model]
        if not any(row.state == "ready" for row in rows):
            raise CliError(f"nobody serves {arguments.model}; `millrace status` shows which models there are")
        order = SetInstances(
            model=arguments.model,
            count=wanted(arguments.count, rows, shape=arguments.shape, role=arguments.role),
            shape=arguments.shape,
            role=InstanceRole(arguments.role) if arguments.role else None,
            plan_epoch=view.epoch(arguments.model),
        )
        subject = Subjects(connection.cluster).coordinate(order.model, "scale")
        answer = await asked(bus, subject, order, timeout_s=ANSWER_S)
        print(taken(answer))
        if arguments.detach or not isinstance(answer, OrderAccepted):
            return 0
        return await _followed(view, answer, limit_s=arguments.limit)


def count(text: str) -> str:
    """COUNT as it was given, for ``wanted``; a number, or a change."""
    try:
        int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number, and no change such as +1 or -1") from None
    return text


def wanted(count: str, rows: Sequence[InstanceRow], *, shape: str = "", role: str | None = None) -> int:
    """Number of instances that COUNT means, among those that serve."""
    if not count.startswith(("+", "-")):
        return int(count)
    meant = [row for row in rows if row.state == "ready" and shape in ("", row.shape) and role in (None, row.role)]
    return len(meant) + int(count)


async def _followed(view: ClusterView, answer: OrderAccepted, *, limit_s: float) -> int:
    began = time.monotonic()
    waits = dict.fromkeys(answer.starting, "ready") | dict.fromkeys(answer.stopping, "gone")
    until_s = max(limit_s if answer.starting else 0.0, answer.limit_ms / 1000 + GRACE_S if answer.stopping else 0.0)
    while waits and time.monotonic() - began < until_s:
        await asyncio.sleep(LOOK_S)
        states = {row.instance: row.state for row in view.instances(time.time_ns())}
        for name, state in list(waits.items()):
            if states.get(name, "dead") in ({"ready"} if state == "ready" else {"dead", "suspect", "drained"}):
                print(f"  {time.monotonic() - began:5.1f} s  {name} is {state}")
                del waits[name]
    for name, state in waits.items():
        print(f"  {name} is not {state} after {until_s:g} s; `millrace status` shows it")
    return 1 if waits else 0
