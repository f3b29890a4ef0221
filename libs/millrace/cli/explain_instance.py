"""The work of `millrace explain INSTANCE`: what its broker does about its requests, or why it moves none."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from nats.aio.msg import Msg

from millrace.cli.bus import open_bus
from millrace.cli.cluster import resolve_connection
from millrace.cli.message_summaries import load_summary
from millrace.contracts.broker import LoadReported, LoadsReported
from millrace.contracts.codec import MalformedMessage, decode
from millrace.contracts.subjects import Subjects

#: Brokers tell the loads of their instances twice a second.
LISTEN_S = 1.6


async def load_of(arguments: argparse.Namespace) -> LoadReported | None:
    """The next load that is told of an instance; None where none is.

    Raises:
        CliError: there is no cluster to listen to.
    """
    connection = resolve_connection(arguments)
    heard: asyncio.Future[LoadReported] = asyncio.get_running_loop().create_future()

    async def on_message(raw: Msg) -> None:
        for load in _loads(raw.data):
            if load.instance == arguments.request and not heard.done():
                heard.set_result(load)

    async with open_bus(connection) as bus:
        await bus.subscribe(Subjects(connection.cluster).loads(), cb=on_message)
        try:
            return await asyncio.wait_for(heard, LISTEN_S)
        except TimeoutError:
            return None


def _loads(payload: bytes) -> list[LoadReported]:
    try:
        body: Any = decode(payload)
    except MalformedMessage:
        return []
    return body.loads if isinstance(body, LoadsReported) else []


def told_of(load: LoadReported) -> list[str]:
    """Two lines: what it carries, and what its broker does about it."""
    carried = load_summary(load).partition(" | ")[0]
    return [carried, f"  {load.why or 'its broker says nothing of moves'}"]
