"""The page's HTTP side: files, one stream of frames for all viewers, the past, requests, and orders.

A viewer that reads slowly is passed over until it has read what it was sent, and goes on with a whole frame. Nothing is
shown without a key beyond loopback; on it, only to a client that names a loopback host, so that no web site reads the
page through a name of its own that leads here. Orders need the operator's password on the bus, which NATS checks: they
are verbs of the command line, in a process of their own, with that password. In a simulation they need no key, and are
carried out by it.
"""

from __future__ import annotations

import asyncio
import hmac
import mimetypes
import re
import sys
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
from millrace.actor.errors import ConfigError
from millrace.cli.errors import CliError
from millrace.cli.explain_spans import explained_by_spans
from millrace.cli.explain_text import told as told_lines
from millrace.cli.trace_reading import attribute, request_of, spans_of
from millrace.contracts.message import Body
from millrace.http.client_connection import ConnectionLimits
from millrace.http.exchange import DisconnectReason, Exchange, HttpRefusal
from millrace.http.server import HttpServer

from services.page.config import PageConfig
from services.page.effects import OrderGiven, ShowFrame, ViewersCounted
from services.page.history import PageRun

STATIC = Path(__file__).parent / "static"
#: A viewer with so much unread gets no more frames, bytes.
BEHIND_BYTES = 200_000
VIEWERS_MAX, ORDERS_MAX = 200, 4
LIMITS = ConnectionLimits(
    body_bytes_max=200_000, buffer_bytes_max=20_000_000, slow_reader_s=60.0, read_s=10.0, idle_s=75.0
)
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)
#: Runs a verb whose words, the password among them, come by standard input: a command line is no place for it.
_RUN = "import json, sys; from millrace.cli.__main__ import main; sys.exit(main(json.load(sys.stdin)))"
#: Views that have an address; ``/r/ID`` is one more.
VIEWS = ("/", "/table", "/plans", "/compare")
#: Orders as the command line takes them, and what may stand for WHAT and TO: no options.
_VERBS: dict[str, tuple[str, ...]] = {
    "drain": ("drain", "WHAT"),
    "back": ("drain", "WHAT", "--back"),
    "migrate": ("migrate", "WHAT"),
    "role": ("role", "WHAT", "TO", "--detach"),
    "scale": ("scale", "WHAT", "TO"),
    "show": ("cluster", "show"),
    "check": ("apply", "FILE", "--dry-run"),
    "apply": ("apply", "FILE"),
}
_GIVEN = re.compile(r"[^-+\s]\S*|[+-]\d{1,4}")


class PageOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An operator's wish.

    Attributes:
        verb: ``drain``, ``back``, ``migrate``, ``role``, ``scale``; ``show``, ``check`` and ``apply`` of the cluster's
            file. Of a simulation: a kind of fault, or ``pace``.
        what: Instance, request or model.
        to: Where to, which role, how many, or how fast.
        text: The cluster's file.
    """

    verb: str
    what: str = ""
    to: str = ""
    text: str = ""

    def words(self) -> list[str]:
        """As the command line takes it. Raises ValueError where it makes no sense."""
        words, given = _VERBS.get(self.verb, ()), {"WHAT": self.what, "TO": self.to}
        if self.verb == "migrate" and self.to:
            words += ("--to", "TO")
        if not words or not all(_GIVEN.fullmatch(given[word]) for word in words if word in given):
            raise ValueError(f"{self.verb!r} is no order, or names nothing")
        return [given.get(word, word) for word in words]


class PageServer:
    """Serves one page of one or more runs, of which the first may go on."""

    def __init__(
        self,
        config: PageConfig,
        runs: Sequence[PageRun],
        deliver: Callable[[Body], None],
        simulated: Callable[[PageOrder], None] | None = None,
    ) -> None:
        """Makes one that does not listen yet.

        Args:
            deliver: Hands local messages to the actor of the first run.
            simulated: Carries out orders in a simulation; raises ValueError for one that makes no sense.
        """
        self._config = config
        self._runs = runs
        self._deliver = deliver
        self._simulated = simulated
        self._open = config.host in LOOPBACK or config.host.startswith("127.")
        if not self._open and not config.bus.password:
            raise ConfigError(f"host {config.host}: others reach it, and the bus has no passwords to ask them for")
        self._viewers: dict[Exchange, bool] = {}  # whether it waits for a whole frame
        self._tasks: set[asyncio.Task[None]] = set()
        self._orders = asyncio.Semaphore(ORDERS_MAX)
        self._server: HttpServer | None = None
        self._files = {f"/static/{file.name}": (file.read_bytes(), _kind(file)) for file in sorted(STATIC.iterdir())}

    async def start(self) -> int:
        """Listens; returns the port. Raises OSError where it is taken."""
        self._server = HttpServer(self.handle, _refused, limits=LIMITS, connections_max=2 * VIEWERS_MAX)
        return await self._server.start(self._config.host, self._config.port, reuse_port=False)

    def close(self) -> None:
        for viewer in list(self._viewers):
            viewer.end()
        if self._server is not None:
            self._server.stop_listening()

    def handle(self, exchange: Exchange) -> None:
        exchange.headers = _HEADERS
        request = exchange.request
        path = request.path
        if request.method == "GET" and (path in VIEWS or path.startswith("/r/")):
            exchange.respond(200, *self._files["/static/index.html"])
        elif request.method == "GET" and path in self._files:
            exchange.respond(200, *self._files[path])
        elif path == "/order" and request.method == "POST":
            self._order(exchange)
        elif not self._may_read(exchange):
            _answer(exchange, {"error": "the viewer's key is needed"}, 401)
        elif path == "/stream":
            self._view(exchange)
        elif path == "/runs":
            _answer(exchange, [run.name for run in self._runs])
        else:
            self._tell_of_run(exchange, path.split("/", 4)[1:])

    def _tell_of_run(self, exchange: Exchange, words: list[str]) -> None:
        """Answers ``/run/NUMBER/history``, ``.../history/FROM``, ``.../ended`` and ``.../request/ID``."""
        number = words[1] if len(words) > 1 and words[0] == "run" else ""
        run = self._runs[int(number)] if number.isdigit() and int(number) < len(self._runs) else None
        match words[2:]:
            case ["history"] if run:
                _answer(exchange, run.spans())
            case ["history", at] if run and at.isdigit() and (past := run.segment(int(at))):
                exchange.respond(200, past, b"text/plain; charset=utf-8", ((b"content-encoding", b"deflate"),))
            case ["ended"] if run:
                _answer(exchange, run.actor.ended())
            case ["request", request] if run:
                self._spawn(self._tell(exchange, run, request_of(request)))
            case _:
                _answer(exchange, {"error": "there is no such page"}, 404)

    def _may_read(self, exchange: Exchange) -> bool:
        host = exchange.request.headers.get(b"host", b"").decode("latin-1").rpartition(":")[0].strip("[]")
        if self._open and host in LOOPBACK:
            return True
        password = self._config.bus.password
        return bool(password) and hmac.compare_digest(_bearer(exchange).encode(), password.encode())

    # Frames

    def show(self, frame: ShowFrame) -> None:
        """Keeps a frame, and sends it to every viewer that can take it."""
        self._runs[0].keep(frame)
        for viewer, waits in list(self._viewers.items()):
            if waits and not viewer.waiting_bytes:
                self._viewers[viewer] = False
                viewer.write(_event(self._runs[0].actor.whole(frame.at_ms)))
            elif not waits:
                self._viewers[viewer] = viewer.waiting_bytes > BEHIND_BYTES
                viewer.write(b"" if self._viewers[viewer] else _event(frame.data))

    def _view(self, exchange: Exchange) -> None:
        if len(self._viewers) >= VIEWERS_MAX:
            _answer(exchange, {"error": f"{VIEWERS_MAX} look on already"}, 503)
            return

        def gone(reason: DisconnectReason) -> None:
            self._viewers.pop(exchange, None)
            self._deliver(ViewersCounted(count=len(self._viewers)))

        exchange.on_gone = gone
        exchange.start_stream((), _event(self._runs[0].actor.whole(self._runs[0].at_ms)))
        self._viewers[exchange] = False
        self._deliver(ViewersCounted(count=len(self._viewers)))

    async def _tell(self, exchange: Exchange, run: PageRun, request: str) -> None:
        """Answers with what was heard of a request, and what was traced, also as `millrace explain` tells it."""
        folder, told = self._config.telemetry.trace_dir, run.actor.told(request)
        try:
            spans = await asyncio.to_thread(spans_of, Path(folder), request) if folder else []
        except (CliError, OSError):
            spans = []
        traced = any(span.name == "ingress" for span in spans)
        known = {
            "text": told_lines(explained_by_spans(spans)) if traced else [],
            "messages": [{"t": at_ns // 1_000_000, "kind": type(b).__name__, "body": b} for at_ns, b in told],
            "spans": [
                {"name": s.name, "service": s.service, "instance": s.instance or attribute(s, "instance")}
                | {"start": s.start_ns / 1e6, "end": s.end_ns / 1e6, "error": s.error}
                for s in spans
            ],
        }
        _answer(exchange, known, 200 if told or spans else 404)

    # Orders

    def _order(self, exchange: Exchange) -> None:
        key, simulated = _bearer(exchange), self._simulated
        try:
            order = msgspec.json.decode(exchange.request.body, type=PageOrder)
            if simulated is not None:
                self._order_simulated(exchange, order, simulated)
                return
            words = order.words()
        except (msgspec.DecodeError, ValueError) as error:
            _answer(exchange, {"error": str(error)}, 400)
            return
        if not key:
            _answer(exchange, {"error": "orders need the operator's key"}, 401)
        else:
            self._spawn(self._carry_out(exchange, words, order.text, key))

    def _order_simulated(self, exchange: Exchange, order: PageOrder, carry_out: Callable[[PageOrder], None]) -> None:
        if exchange.request.headers.get(b"content-type") != b"application/json" or not self._may_read(exchange):
            _answer(exchange, {"error": "only the page itself may ask for this"}, 403)  # no form of another site
            return
        carry_out(order)
        if order.verb != "pace":
            self._deliver(OrderGiven(text=f"{order.verb.replace('_', ' ')} {order.what}", code=0))
        _answer(exchange, {})

    async def _carry_out(self, exchange: Exchange, words: list[str], file: str, key: str) -> None:
        async with self._orders:  # others wait
            with tempfile.NamedTemporaryFile("w", suffix=".toml") as stored:
                stored.write(file)
                stored.flush()
                await self._run(exchange, [stored.name if word == "FILE" else word for word in words], words, key)

    async def _run(self, exchange: Exchange, words: list[str], told: list[str], key: str) -> None:
        bus, text = self._config.bus, " ".join(told)
        where = ["--nats", bus.servers[0], "--cluster", bus.cluster, "--user", "operator", "--password", key]
        where += ["--dir", self._config.folder] if self._config.folder else []
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-u", "-c", _RUN, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode([*words, *where]))
        process.stdin.close()
        self._deliver(OrderGiven(text=text))
        exchange.start_stream((), b"")
        async for line in process.stdout:
            exchange.write(_event(msgspec.json.encode({"line": line.decode(errors="replace").rstrip()})))
        code = await process.wait()
        self._deliver(OrderGiven(text=text, code=code))
        exchange.end(_event(msgspec.json.encode({"code": code})))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _bearer(exchange: Exchange) -> str:
    scheme, _, token = exchange.request.headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _event(data: bytes) -> bytes:
    return b"data: %b\n\n" % data


def _kind(file: Path) -> bytes:
    return f"{mimetypes.guess_type(file.name)[0] or 'text/plain'}; charset=utf-8".encode()


def _answer(exchange: Exchange, body: Any, status: int = 200) -> None:
    exchange.respond(status, msgspec.json.encode(body, enc_hook=str))


def _refused(exchange: Exchange, refusal: HttpRefusal) -> None:
    _answer(exchange, {"error": refusal.message}, refusal.status)
