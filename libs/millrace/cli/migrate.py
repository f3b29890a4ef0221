"""Moves a running request, with its KV, to another instance; its stream continues.

REQUEST is a request's id (its sequences move one by one), a sequence's id, or the `x-request-id` that the client sent.
The command finds its instance in the instances' snapshots. It prints one line per sequence: source, target, outcome,
and the time without a token. The exit code is 0 if every sequence has moved.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from nats.aio.client import Client
from nats.aio.msg import Msg

from millrace.cli.bus import open_bus
from millrace.cli.cluster import add_connection_options, resolve_connection
from millrace.cli.errors import CliError
from millrace.cli.field_text import duration
from millrace.cli.operating import asked, headers_of
from millrace.cli.trace_reading import request_of
from millrace.contracts.codec import MalformedMessage, decode, encode
from millrace.contracts.ingress import FindRequests, RequestsFound
from millrace.contracts.kv import KvRefusal
from millrace.contracts.message import Body, ErrorReply
from millrace.contracts.migration import MigrateSequence, MigrationFinished, MigrationMode, MigrationOutcome
from millrace.contracts.sequences import request_id_of
from millrace.contracts.status import StatusSnapshot
from millrace.contracts.subjects import Subjects


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument(
        "request", metavar="REQUEST", help="id of a request, the client's own or ours, or of one of its sequences"
    )
    parser.add_argument("--to", default="", metavar="INSTANCE", help="default: where it delays others least")
    parser.add_argument(
        "--mode",
        choices=[str(mode) for mode in MigrationMode],
        help="how the KV is moved (default: as the migrator is configured)",
    )
    parser.add_argument(
        "--within", type=float, default=2.0, metavar="S", help="wait this long for a sequence that cannot move yet"
    )
    add_connection_options(parser)


#: A snapshot comes at least every 250 ms; a request just placed shows in the next one.
LISTEN_S = 1.0

#: A migration ends by its own deadlines well before this.
ANSWER_S = 30.0


async def run(arguments: argparse.Namespace) -> int:
    """Returns the exit code.

    Raises:
        CliError: nothing of that name runs anywhere.
    """
    connection = resolve_connection(arguments, operator=True)
    subjects = Subjects(connection.cluster)
    async with open_bus(connection) as bus:
        places = await find(bus, subjects, request_of(arguments.request))
        for request in () if places else await of_client(bus, subjects, arguments.request):
            places |= await find(bus, subjects, request)
        if not places:
            raise CliError(f"{arguments.request} runs nowhere; has it ended? `millrace status` shows what runs")
        moves = [_move(bus, subjects, arguments, sequence, place) for sequence, place in sorted(places.items())]
        moved = [await move for move in asyncio.as_completed(moves)]
    return 0 if all(moved) else 1


async def find(bus: Client, subjects: Subjects, wanted: str) -> dict[str, str]:
    """Sequences of a request (or that one sequence) and the instance of each, by what snapshots say last."""
    places: dict[str, str] = {}
    for body in await _heard(bus, f"{subjects.prefix}.status.*.*"):
        if isinstance(body, StatusSnapshot):
            there = [status.sequence for status in (*body.running, *body.waiting) if is_of(status.sequence, wanted)]
            places.update(dict.fromkeys(there, body.instance))
    return places


async def of_client(bus: Client, subjects: Subjects, client_id: str) -> list[str]:
    """Ids of the open requests whose client sent this ``x-request-id``."""
    inbox, question = bus.new_inbox(), FindRequests(client_id=client_id)

    async def ask() -> None:
        await bus.publish(subjects.find(), encode(question), reply=inbox, headers=headers_of(question, ""))

    answers = await _heard(bus, inbox, ask)
    return [request for body in answers if isinstance(body, RequestsFound) for request in body.requests]


async def _heard(bus: Client, subject: str, ask: Callable[[], Awaitable[None]] | None = None) -> list[Body]:
    """Return the messages that come on a subject within LISTEN_S, those that can be read."""
    found: list[Body] = []

    async def on_message(raw: Msg) -> None:
        with suppress(MalformedMessage):
            found.append(decode(raw.data))

    subscription = await bus.subscribe(subject, cb=on_message)
    if ask is not None:
        await ask()
    await asyncio.sleep(LISTEN_S)
    await subscription.unsubscribe()
    return found


def is_of(sequence: str, wanted: str) -> bool:
    """Whether ``wanted`` is the sequence or its request."""
    return wanted in (sequence, request_id_of(sequence))


async def _move(bus: Client, subjects: Subjects, arguments: argparse.Namespace, sequence: str, place: str) -> bool:
    body = MigrateSequence(
        sequence=sequence,
        target=arguments.to,
        within_ms=int(arguments.within * 1000),
        mode=MigrationMode(arguments.mode) if arguments.mode else None,
    )
    answer = await asked(
        bus,
        subjects.migrate(place, "start"),
        body,
        timeout_s=arguments.within + ANSWER_S,
        request=request_id_of(sequence),
    )
    print(line(sequence, place, answer))
    return isinstance(answer, MigrationFinished) and answer.outcome is MigrationOutcome.MOVED


def line(sequence: str, place: str, answer: Body | str) -> str:
    """Return the result of a migration as one line for a person."""
    match answer:
        case MigrationFinished():
            return told(answer)
        case ErrorReply():
            return f"{sequence} {place} → ?  not moved: {answer.reason} {answer.detail}"
        case str():
            return f"{sequence} {place} → ?  not moved: {answer} (is there a broker for {place}?)"
        case _:
            return f"{sequence} {place} → ?  not moved: {answer.type_name()} came"


#: Refusals in words. docs/OPERATIONS.md says by their codes what to look at.
REFUSALS = {
    KvRefusal.UNKNOWN_SEQUENCE: "it does not run there any more",
    KvRefusal.NOT_RUNNING: "it still waits, or computes its prompt",
    KvRefusal.IMMOVABLE: "something of it cannot be carried",
    KvRefusal.LEASE_LOST: "the source preempted or ended it meanwhile",
    KvRefusal.NO_BLOCKS: "the target has too few idle KV blocks",
    KvRefusal.TOO_MANY: "as many transfers as may be run already",
    KvRefusal.INCOMPATIBLE: "the engines differ, or have no way of copying in common",
    KvRefusal.UNABLE: "this engine moves nothing",
    KvRefusal.COPY_FAILED: "the copy failed",
    KvRefusal.TARGET_REFUSED: "the target drains or is full",
    KvRefusal.EPOCH_REFUSED: "its ingress does not let it move: it has ended, or moves already",
    KvRefusal.NO_BID: "the target's bid had expired",
    KvRefusal.UNANSWERED: "the other side did not answer in time",
    KvRefusal.CANCELLED: "it was cancelled",
    KvRefusal.NO_TARGET: "no instance can take it",
    KvRefusal.INVALID: "the order makes no sense",
}


def told(body: MigrationFinished) -> str:
    """``<sequence> <from> → <to>  moved ...``, or why not: in words, then the code and the details."""
    way = f"{body.sequence} {body.source} → {body.target or '?'}"
    if body.outcome is not MigrationOutcome.MOVED:
        if body.refusal is None:
            return f"{way}  {body.outcome}: {body.detail}".rstrip(" :")
        return f"{way}  {body.outcome}: {REFUSALS[body.refusal]} ({body.refusal}: {body.detail})".replace(": )", ")")
    cost = body.cost
    copied = f", {cost.bytes / 2**20:.2f} MiB in {cost.descriptors} pieces by {cost.copier}" if cost.copier else ""
    matched = f", {cost.matched_blocks} blocks were there" if cost.matched_blocks else ""
    return (
        f"{way}  moved in epoch {body.epoch}: {cost.tokens} tokens, no token for {duration(cost.frozen_ns)}, "
        f"{cost.rounds} rounds{copied}{matched}, {duration(cost.duration_ns)} in all"
    )
