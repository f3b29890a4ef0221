"""Prints messages of a subject as they pass, one line each: time, subject, sender → type, request, main fields.

SUBJECT is relative to the cluster's prefix: `millrace tap 'decision.>'` taps mr.<cluster>.decision.>; NATS wildcards
are * (one token) and > (the rest). A subject that begins with mr. or $ is used unchanged. Replies go to the requester's
private inbox and are not shown. Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import time
from collections.abc import Callable

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from millrace.actor.nats_client import settle
from millrace.cli.bus import open_bus
from millrace.cli.cluster import ConnectionSettings, add_connection_options, resolve_connection
from millrace.cli.errors import CliError
from millrace.cli.message_lines import DecodedMessage, message_line, message_object, read_message
from millrace.contracts.codec import HEADER_REQUEST, HEADER_SENDER, HEADER_TRACE, HEADER_TYPE
from millrace.contracts.subjects import Subjects


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("subject", nargs="?", default=">", metavar="SUBJECT", help="default: > (everything)")
    parser.add_argument("--count", type=int, default=0, metavar="N", help="end after N messages")
    parser.add_argument("--headers-only", action="store_true", help="leave the fields out")
    parser.add_argument("--json", action="store_true", help="one JSON object per line, complete")
    add_connection_options(parser)


SHOWN_HEADERS = (HEADER_TYPE, HEADER_SENDER, HEADER_REQUEST, HEADER_TRACE)

#: Messages that may wait to be printed; past it NATS drops for this client alone, and tap says so.
PENDING_MAX = 65_536

#: Columns where standard output is no terminal.
WIDTH_ELSEWHERE = 100_000


class Printer:
    """Turns raw messages into lines on standard output, up to a count."""

    def __init__(self, arguments: argparse.Namespace, prefix: str) -> None:
        """``prefix`` is left out of the subjects shown."""
        self._prefix = prefix
        self._json: bool = arguments.json
        self._headers_only: bool = arguments.headers_only
        self._left: int | None = arguments.count or None
        self._paint = sys.stdout.isatty() and not os.environ.get("NO_COLOR")

    def show(self, message: Msg) -> bool:
        """Prints one message; False once the count is reached."""
        if self._left == 0:
            return False
        reading = read_message(
            at_ns=time.time_ns(),
            subject=message.subject,
            payload=message.data,
            headers={name: (message.headers or {}).get(name, "") for name in SHOWN_HEADERS},
            reply_to=message.reply,
            prefix=self._prefix,
        )
        print(self._line(reading), flush=True)
        if self._left is not None:
            self._left -= 1
        return self._left != 0

    def _line(self, reading: DecodedMessage) -> str:
        if self._json:
            return msgspec.json.encode(message_object(reading), enc_hook=str).decode()
        # Asked for each line: a person resizes the window.
        width = shutil.get_terminal_size((WIDTH_ELSEWHERE, 24)).columns
        return message_line(reading, width=width, headers_only=self._headers_only, paint=self._paint)


async def run(arguments: argparse.Namespace) -> int:
    """Subscribes and prints until the count, an error, or cancellation by Ctrl-C."""
    connection = resolve_connection(arguments)
    prefix = Subjects(connection.cluster).prefix
    subject = full_subject(arguments.subject, prefix)
    printer = Printer(arguments, prefix)
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def on_message(raw: Msg) -> None:
        # A callback runs in the client's own task: what it raises would vanish in its error callback.
        try:
            if not printer.show(raw) and not done.done():
                done.set_result(None)
        except OSError as error:  # the reader of our output is gone, or the disk is full
            if not done.done():
                done.set_exception(error)

    async with open_bus(connection, on_state=_tell_state) as bus:
        await _subscribe(bus, connection, subject, on_message)
        await done
    return 0


def full_subject(subject: str, prefix: str) -> str:
    """The subject as NATS knows it; the prefix may be left out."""
    return subject if subject.startswith(("mr.", "$", "_INBOX.")) else f"{prefix}.{subject}"


async def _subscribe(
    bus: Client, connection: ConnectionSettings, subject: str, on_message: Callable[[Msg], object]
) -> None:
    """Subscribes and waits until the server has said whether that is allowed."""
    try:
        await bus.subscribe(subject, cb=on_message, pending_msgs_limit=PENDING_MAX)  # type: ignore[arg-type]
        await settle(bus)
    except (ValueError, nats.errors.Error) as error:
        raise CliError(f"{subject} cannot be tapped: {error}") from None
    refusal = str(bus.last_error or "")
    if "permissions violation" in refusal.lower():
        who = connection.user or "(no user)"
        raise CliError(f"the NATS server does not let user {who} read {subject}")


def _tell_state(state: str) -> None:
    text = {"disconnected": "-- the NATS server is gone, waiting for it --", "reconnected": "-- it is back --"}[state]
    print(text, file=sys.stderr, flush=True)
