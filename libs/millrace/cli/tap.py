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
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg

from millrace.actor.headers import read_header
from millrace.actor.nats_client import settle
from millrace.actor.recording import RecordingReader, RecordingWriter, Tapped
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
    parser.add_argument("--record", type=Path, metavar="FILE", help="keep the messages in FILE as well")
    parser.add_argument("--read", type=Path, metavar="FILE", help="print a recording instead of the bus")
    add_connection_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Taps until --count or Ctrl-C."""
    if arguments.read:
        return read_recording(arguments)
    return asyncio.run(tap(arguments))


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

    def show(self, message: Tapped) -> bool:
        """Prints one message; False once the count is reached."""
        if self._left == 0:
            return False
        reading = read_message(
            at_ns=message.at_ns,
            subject=message.subject,
            payload=message.payload,
            headers={name: read_header(message.headers, name) for name in SHOWN_HEADERS},
            reply_to=message.reply_to,
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


async def tap(arguments: argparse.Namespace) -> int:
    """Subscribes and prints until the count, an error, or cancellation by Ctrl-C."""
    connection = resolve_connection(arguments)
    prefix = Subjects(connection.cluster).prefix
    subject = full_subject(arguments.subject, prefix)
    printer = Printer(arguments, prefix)
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with ExitStack() as stack:
        record = _open_record(arguments, stack)

        async def on_message(raw: Msg) -> None:
            # A callback runs in the client's own task: what it raises would vanish in its error callback.
            try:
                message = _tapped(raw)
                if record is not None and not done.done():
                    record.tapped(message)
                if not printer.show(message) and not done.done():
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


def read_recording(arguments: argparse.Namespace) -> int:
    """Prints what --record kept.

    Raises:
        CliError: the file cannot be read, or is no recording.
    """
    try:
        reader = RecordingReader(arguments.read)
        printer: Printer | None = None
        for message in reader:
            printer = printer or Printer(arguments, ".".join(message.subject.split(".")[:2]))
            if not printer.show(message):
                break
    except FileNotFoundError:
        raise CliError(f"there is no file {arguments.read}") from None
    except ValueError as error:
        raise CliError(str(error)) from None
    return 0


def _open_record(arguments: argparse.Namespace, stack: ExitStack) -> RecordingWriter | None:
    if arguments.record is None:
        return None
    try:
        return stack.enter_context(closing(RecordingWriter(arguments.record)))
    except OSError as error:
        raise CliError(f"{arguments.record} cannot be written: {error.strerror}") from None


def _tapped(raw: Msg) -> Tapped:
    lines = "".join(f"{name}: {value}\r\n" for name, value in (raw.headers or {}).items())
    return Tapped(
        at_ns=time.time_ns(),
        subject=raw.subject,
        payload=raw.data,
        headers=f"NATS/1.0\r\n{lines}\r\n".encode() if lines else b"",
        reply_to=raw.reply or "",
    )


async def _subscribe(
    bus: Client, connection: ConnectionSettings, subject: str, on_message: Callable[[Msg], object]
) -> None:
    """Subscribes and waits until the server has said whether that is allowed."""
    import nats.errors

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
