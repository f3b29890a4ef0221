"""Explains the placement of one request: candidates, predictions, the choice with its reason, and the outcome.

REQUEST is a request id (the `id` of the API's response, or the client's own `x-request-id`), a sequence id or a trace
id. Reads `.millrace/traces/`.

INSTANCE is a running one: explains what its broker does about the requests there, or why it moves none. MODEL is a
served one: explains its plan, and what the autopilot advises.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nats.aio.msg import Msg

from millrace.cli.bus import open_bus
from millrace.cli.cluster import add_connection_options, resolve_connection
from millrace.cli.errors import CliError
from millrace.cli.explain_spans import explained_by_spans
from millrace.cli.explain_text import told
from millrace.cli.listening import STORE_TIMEOUT_S, listen
from millrace.cli.message_summaries import load_summary
from millrace.cli.status_table import advice_lines
from millrace.cli.trace import trace_folder
from millrace.cli.trace_reading import is_request, request_of, spans_of
from millrace.contracts.broker import LoadReported, LoadsReported
from millrace.contracts.codec import MalformedMessage, decode
from millrace.contracts.plan import Plan
from millrace.contracts.subjects import Subjects

#: Brokers tell the loads of their instances twice a second.
LISTEN_S = 1.6

LOOK_S = 0.02


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("request", metavar="REQUEST|INSTANCE|MODEL")
    add_connection_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the explanation."""
    print("\n".join(_told_by_cluster(arguments) or _told_by_spans(arguments)))
    return 0


def _told_by_spans(arguments: argparse.Namespace) -> list[str]:
    folder = trace_folder(arguments.dir and Path(arguments.dir))
    return told(explained_by_spans(spans_of(folder, request_of(arguments.request))))


def _told_by_cluster(arguments: argparse.Namespace) -> list[str]:
    """Lines on a model or an instance of that name; none where there is neither, or no cluster runs."""
    if is_request(arguments.request):  # who asks for one need not wait for the cluster
        return []
    try:
        return asyncio.run(told_by_cluster(arguments))
    except CliError:
        return []


async def told_by_cluster(arguments: argparse.Namespace) -> list[str]:
    """Lines on a model's plan, or an instance's load; none where there is neither.

    Raises:
        CliError: there is no cluster to listen to.
    """
    async with listen(resolve_connection(arguments)) as view:
        if await _until(lambda: bool(view.plans()), STORE_TIMEOUT_S) and arguments.request in view.plans():
            return told_of_plan(view.plans()[arguments.request])
    load = await load_of(arguments)
    return [] if load is None else told_of(load)


async def _until(holds: Callable[[], bool], limit_s: float) -> bool:
    end_s = time.monotonic() + limit_s
    while not holds() and time.monotonic() < end_s:  # noqa: ASYNC110 - the view tells nobody
        await asyncio.sleep(LOOK_S)
    return holds()


def told_of_plan(plan: Plan) -> list[str]:
    """Its stages and why they are, and what the autopilot advises."""
    stages = ", ".join(
        f"{stage.name} from {stage.length_min:,} tokens: {len(stage.instances)}" for stage in plan.stages
    )
    lines = [f"plan {plan.epoch} of {plan.model}, by {plan.policy or 'its coordinator'}: {plan.reason}"]
    lines.append(f"  instances of stage {stages}")
    if plan.advice is not None:
        lines += [f"  {line}" for line in advice_lines(plan.advice)]
    return lines


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
