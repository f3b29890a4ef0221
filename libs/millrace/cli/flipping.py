"""The work of `millrace role`: the order to the model's coordinator, and what becomes of it."""

from __future__ import annotations

import argparse
import asyncio
import time

from nats.aio.client import Client

from millrace.cli.bus import open_bus
from millrace.cli.cluster import resolve_connection
from millrace.cli.cluster_rows import InstanceRow
from millrace.cli.cluster_view import ClusterView
from millrace.cli.errors import CliError
from millrace.cli.listening import LISTEN_S, listen
from millrace.cli.operating import asked
from millrace.contracts.coordinator import OrderAccepted, OrderRefused, SetRole
from millrace.contracts.message import Body
from millrace.contracts.plan import InstanceRole
from millrace.contracts.subjects import Subjects

#: The active coordinator answers at once; while another one takes over, nobody does.
ANSWER_S = 2.0
ASKED_MAX = 3

LOOK_S = 0.1


async def flip(arguments: argparse.Namespace) -> int:
    """Returns the exit code: 0 where the instance has the role, or the order was taken with --detach.

    Raises:
        CliError: there is no such instance, or the coordinator refuses.
    """
    connection = resolve_connection(arguments, operator=True)
    async with listen(connection) as view, open_bus(connection) as bus:
        await asyncio.sleep(LISTEN_S)
        row = _row(view, arguments.instance)
        if row is None:
            raise CliError(f"no instance {arguments.instance}; `millrace status` shows which there are")
        order = SetRole(
            model=row.model,
            instance=row.instance,
            role=InstanceRole(arguments.role),
            plan_epoch=view.epoch(row.model),
            wait=not arguments.now,
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
    """Prints each change until the instance has its role."""
    began = time.monotonic()
    said = ""
    while time.monotonic() - began < limit_s:
        await asyncio.sleep(LOOK_S)
        row = _row(view, order.instance)
        if row is None:
            continue
        if row.role != said:
            print(f"  {time.monotonic() - began:5.1f} s  {order.instance} does {row.role}")
            said = row.role
        if row.role == order.role and not any(name == order.instance for name, _, _ in view.orders()):
            return 0
    print(f"not done after {limit_s:g} s; the order stands, `millrace status` shows it")
    return 1


def _row(view: ClusterView, instance: str) -> InstanceRow | None:
    return next((row for row in view.instances(time.time_ns()) if row.instance == instance), None)
