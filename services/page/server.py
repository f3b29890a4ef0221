"""The page's HTTP side: files, one stream of frames for all viewers, the past, requests, and orders.

A viewer that reads slowly is passed over until it has read what it was sent, and goes on with a whole frame. Beyond
loopback viewers need a key; on it a client must name a loopback host, so that no web site reads the page by a name of
its own that leads here. Orders are verbs of the command line in processes of their own, with the operator's password.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from millrace.actor.effects import Effect
from millrace.actor.errors import ConfigError
from millrace.actor.runtime_nats import ActorHandle
from millrace.actor.task_shell import TaskShell
from millrace.cli.errors import CliError
from millrace.cli.explain_spans import explained_by_spans
from millrace.cli.explain_text import told as told_lines
from millrace.cli.trace_reading import request_of, spans_of
from millrace.http.client_connection import ConnectionLimits
from millrace.http.exchange import Exchange, HttpRefusal
from millrace.http.server import HttpServer

from services.page.actor import OrderGiven, PageActor, ShowFrame
from services.page.config import PageConfig

STATIC = Path(__file__).parent / "static"
#: A viewer with so much unread gets no more frames, bytes.
BEHIND_BYTES = 200_000
CONNECTIONS_MAX, ORDERS_MAX = 400, 4
LIMITS = ConnectionLimits(body_bytes_max=200_000, buffer_bytes_max=20_000_000, slow_reader_s=60, read_s=10, idle_s=75)
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_HEADERS = (
    (b"content-security-policy", b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)
_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
#: Runs a verb whose words, the password among them, come by standard input: a command line is no place for it.
_RUN = "import json, sys, millrace.cli.__main__ as cli; sys.exit(cli.main(json.loads(sys.stdin.buffer.readline())))"
#: Views that have an address; ``/r/ID`` is one more.
VIEWS = ("/", "/table", "/plans", "/compare")
#: Orders, as typed after `millrace`; a file to apply comes with it. No word of a viewer's is an option.
_ORDER = re.compile(
    r"(drain W( --back)?|migrate W( --to W)?|role W W --detach|scale W [+-]?\d{1,4})".replace("W", r"[^-+\s]\S*")
    + r"|cluster show|apply -( --dry-run)?"
)


class PageServer(TaskShell):
    """Serves one page of one or more runs, of which the first may go on."""

    def __init__(self, config: PageConfig, runs: Sequence[PageActor]) -> None:
        """``runs``: what is known of them; a live one's before it listens."""
        super().__init__()
        self._config = config
        self._runs = runs
        self._open = config.host in LOOPBACK or config.host.startswith("127.")
        if not self._open and not config.bus.password:
            raise ConfigError(f"host {config.host}: others reach it, and the bus has no passwords to ask them for")
        self.viewers: dict[Exchange, bool] = {}  # who looks on, and whether they wait for a whole frame
        self._orders = asyncio.Semaphore(ORDERS_MAX)
        kinds = {file: f"{_KINDS[file.suffix]}; charset=utf-8".encode() for file in STATIC.iterdir()}
        self._files = {f"/static/{file.name}": (file.read_bytes(), kind) for file, kind in kinds.items()}

    def handlers(self) -> Mapping[type[Effect], Callable[[Any], None]]:
        return {ShowFrame: self.show}

    def attach(self, handle: ActorHandle) -> None:
        super().attach(handle)
        self.spawn(self.start())

    async def start(self) -> None:
        """Listens at ``port`` from then on; ends the process where that is taken."""
        server = HttpServer(self.handle, _refuse, limits=LIMITS, connections_max=CONNECTIONS_MAX)
        try:
            self.port = await server.start(self._config.host, self._config.port, reuse_port=False)
        except OSError as error:
            sys.exit(f"page: it cannot listen at {self._config.host}:{self._config.port}: {error.strerror}")

    def handle(self, exchange: Exchange) -> None:
        exchange.headers = _HEADERS
        method, path = exchange.request.method, exchange.request.path
        file = "/static/index.html" if path in VIEWS or path.startswith("/r/") else path
        orders = (method, path) == ("POST", "/order")
        if method == "GET" and file in self._files:
            exchange.respond(200, *self._files[file])
        elif not (exchange.bearer if orders else self.may_read(exchange)):  # no form of another site has a bearer's key
            _answer(exchange, {"error": f"the {'operator' if orders else 'viewer'}'s key is needed"}, 401)
        elif orders:
            self._order(exchange)
        else:
            self._inform(exchange, path.split("/", 4)[1:])

    def _inform(self, exchange: Exchange, words: list[str]) -> None:
        run = {str(number): run for number, run in enumerate(self._runs)}.get(words[1]) if len(words) > 1 else None
        match words:
            case ["stream"]:
                exchange.on_gone = lambda _reason: self.viewers.__delitem__(exchange)
                exchange.start_stream((), _event(self._runs[0].whole()))
                self.viewers[exchange] = False
            case ["run", _, "history"] if run:
                _answer(exchange, run.past.spans())
            case ["run", _, "history", at] if run and at.isdigit() and (past := run.past.segment(int(at))):
                exchange.respond(200, past, b"text/plain; charset=utf-8", ((b"content-encoding", b"deflate"),))
            case ["run", _, "request", request] if run:
                self.spawn(self._explain(exchange, run, request_of(request)))
            case _:
                _answer(exchange, {"error": "there is no such page"}, 404)

    def may_read(self, exchange: Exchange) -> bool:
        """Whether it is asked on loopback by a loopback name, or with the viewer's key."""
        host = exchange.request.headers.get(b"host", b"").decode("latin-1").rpartition(":")[0].strip("[]")
        password = self._config.bus.password.encode()
        return (self._open and host in LOOPBACK) or (bool(password) and hmac.compare_digest(exchange.bearer, password))

    def show(self, frame: ShowFrame) -> None:
        """Sends a frame to every viewer that can take it."""
        for viewer, waits in list(self.viewers.items()):
            self.viewers[viewer] = viewer.waiting_bytes > (0 if waits else BEHIND_BYTES)
            if not self.viewers[viewer]:
                viewer.write(_event(self._runs[0].whole() if waits else frame.data))

    async def _explain(self, exchange: Exchange, run: PageActor, request: str) -> None:
        """Answers with what was heard of a request, and what was traced, also as `millrace explain` tells it."""
        folder, told, text, spans = self._config.telemetry.trace_dir, run.told(request), [], []
        with suppress(CliError, OSError):  # it was not traced, or not yet whole
            spans = await asyncio.to_thread(spans_of, Path(folder), request) if folder else []
            text = told_lines(explained_by_spans(spans))
        _answer(exchange, {"text": text, "messages": told, "spans": spans}, 200 if told or spans else 404)

    def _order(self, exchange: Exchange) -> None:
        try:
            asked = msgspec.json.decode(exchange.request.body, type=dict[str, str])
            self.carry_out(exchange, asked["order"], asked.get("file", ""))
        except (msgspec.DecodeError, KeyError, ValueError) as error:
            _answer(exchange, {"error": str(error)}, 400)

    def carry_out(self, exchange: Exchange, order: str, file: str) -> None:
        """Carries out an order that came with some key; answers what it says. Raises ValueError for what is none."""
        if not _ORDER.fullmatch(order):
            raise ValueError(f"{order!r} is no order, or names nothing")
        self.spawn(self._run_verb(exchange, order, file))

    async def _run_verb(self, exchange: Exchange, order: str, file: str) -> None:
        bus, folder = self._config.bus, self._config.folder
        where = ["--nats", bus.servers[0], "--cluster", bus.cluster, "--dir", folder, "--user", "operator"]
        where += ["--tls", bus.tls] if bus.tls else []
        words = msgspec.json.encode([*order.split(), *where, "--password", exchange.bearer.decode()])
        async with self._orders:  # others wait
            command = (sys.executable, "-u", "-c", _RUN)
            process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=STDOUT)
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(words + b"\n" + file.encode())
            process.stdin.close()
            self.tell(OrderGiven(text=order))
            exchange.start_stream((), b"")
            async for line in process.stdout:
                exchange.write(_event(msgspec.json.encode({"line": line.decode(errors="replace").rstrip()})))
            code = await process.wait()
        self.tell(OrderGiven(text=order, code=code))
        exchange.end(_event(msgspec.json.encode({"code": code})))


def _event(data: bytes) -> bytes:
    return b"data: %b\n\n" % data


def _answer(exchange: Exchange, body: Any, status: int = 200) -> None:
    exchange.respond(status, msgspec.json.encode(body, enc_hook=str))


def _refuse(exchange: Exchange, refusal: HttpRefusal) -> None:
    _answer(exchange, {"error": refusal.message}, refusal.status)
