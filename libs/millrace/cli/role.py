"""Gives an instance another role: prefill, decode or both.

The coordinator of the instance's model changes the role in two steps. First the instance has the role `both`: it takes
new requests and keeps its own until no migration from it is open. Then it gets its new role. Running requests
continue without a pause. The order waits while another flip is under way, and for 10 s after a flip of the instance or
of another one of its stage. It is refused for an unknown instance, if a stage would have no instance for prefill or for
decode, and if the plan has changed since the command read it.

The role stays until the next order, across restarts of instances and of the coordinator. A role policy (`flips` of the
coordinator) may still change it under load.
"""

from __future__ import annotations

import argparse
import asyncio
import time

from nats.aio.client import Client

from millrace.cli.bus import open_bus
from millrace.cli.cluster import add_connection_options, resolve_connection
from millrace.cli.cluster_view import ClusterView
from millrace.cli.errors import CliError
from millrace.cli.listening import LISTEN_S, listen
from millrace.cli.operating import asked
from millrace.contracts.coordinator import OrderAccepted, OrderRefused, SetRole
from millrace.contracts.message import Body
from millrace.contracts.plan import InstanceRole
from millrace.contracts.subjects import Subjects


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("instance", metavar="INSTANCE", help="see `millrace status`")
    parser.add_argument("role", choices=[str(role) for role in InstanceRole])
    parser.add_argument(
        "--limit", type=float, default=60.0, metavar="S", help="how long to follow the flip (default: 60)"
    )
    parser.add_argument("--detach", action="store_true", help="return once the order is taken")
    add_connection_options(parser)


#: The active coordinator answers at once; while another one takes over, nobody does.
ANSWER_S = 2.0
ASKED_MAX = 3

LOOK_S = 0.1


async def run(arguments: argparse.Namespace) -> int:
    """Returns the exit code: 0 where the instance has the role, or the order was taken with --detach.

    Raises:
        CliError: there is no such instance, or the coordinator refuses.
    """
    connection = resolve_connection(arguments, operator=True)
    async with listen(connection) as view, open_bus(connection) as bus:
        await asyncio.sleep(LISTEN_S)
        row = view.instance(arguments.instance, time.time_ns())
        if row is None:
            raise CliError(f"no instance {arguments.instance}; `millrace status` shows which there are")
        order = SetRole(
            model=row.model,
            instance=row.instance,
            role=InstanceRole(arguments.role),
            plan_epoch=view.epoch(row.model),
        )
        print(f"{row.instance} does {row.role}; {taken(await _ordered(bus, Subjects(connection.cluster), order))}")
        return 0 if arguments.detach else await _followed(view, order, limit_s=arguments.limit)


async def _ordered(bus: Client, subjects: Subjects, order: SetRole) -> Body | str:
    """The answer. The same order may be given again where nobody answered."""
    answer: Body | str = ""
    for _ in range(ASKED_MAX):
        answer = await asked(bus, subjects.coordinate(order.model, "role"), order, timeout_s=ANSWER_S)
        if not isinstance(answer, str):
            break
    return answer


def taken(answer: Body | str) -> str:
    """Detail of an order that was accepted.

    Raises:
        CliError: it was refused, or nobody leads the model.
    """
    match answer:
        case OrderAccepted():
            return answer.detail
        case OrderRefused():
            raise CliError(f"refused ({answer.reason}): {answer.detail}")
        case str():
            raise CliError(f"no coordinator takes the order: {answer}")
        case _:
            raise CliError(f"{answer.type_name()} is no answer")


async def _followed(view: ClusterView, order: SetRole, *, limit_s: float) -> int:
    began = time.monotonic()
    said = ""
    while time.monotonic() - began < limit_s:
        await asyncio.sleep(LOOK_S)
        row = view.instance(order.instance, time.time_ns())
        if row is None:
            continue
        if row.role != said:
            print(f"  {time.monotonic() - began:5.1f} s  {order.instance} does {row.role}")
            said = row.role
        if row.role == order.role and not any(name == order.instance for name, _, _ in view.orders()):
            return 0
    print(f"not done after {limit_s:g} s; the order stands, `millrace status` shows it")
    return 1
