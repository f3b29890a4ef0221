"""A runtime's connection to NATS: made, lost, restored; and the bounded way out."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Coroutine
from typing import Any

from nats.errors import Error as NatsError

from millrace.actor.bus_tls import bus_context
from millrace.actor.config import BusConfig
from millrace.actor.errors import BusRefused, BusUnavailable
from millrace.actor.meter import RuntimeMeter
from millrace.actor.nats_client import DirectClient, close_client
from millrace.contracts.permissions import store_user
from millrace.contracts.subjects import subject_token

#: How long connect() tries before it says that there is no server, seconds.
CONNECT_S = 10.0

#: Pause between attempts to reconnect, seconds. Short: a restarted local server is back in well under a second.
RECONNECT_S = 0.1

#: Pause before a connection that the server ended with an error is opened anew, seconds: the error may come again.
REOPEN_S = 1.0

#: The server is asked this often whether it lives, seconds; two missing answers count as a lost connection.
PING_S = 2.0

#: How long close() waits for the server to have taken everything, seconds.
FLUSH_S = 2

#: Distinct errors of the client that get a log line; beyond it they are only counted.
ERRORS_LOGGED_MAX = 100

_SUBJECT = re.compile(r"[^ \t\r\n]+")

#: Writes a log line: (level, event, fields).
LogLine = Callable[[str, str, dict[str, Any]], None]


class Connection:
    """One NATS connection. Callbacks are plain functions, called on the event loop.

    Attributes:
        connected: False from the loss of the server until it is back and knows our subscriptions.
        inbox_prefix: ``_INBOX.<user>.<random>.``: so narrow that permissions can be.
    """

    def __init__(
        self, *, bus: BusConfig, name: str, meter: RuntimeMeter, log: LogLine, echo: bool = True, store: bool = False
    ) -> None:
        """Makes no connection yet.

        Args:
            echo: Whether the server sends what this connection publishes back to its own subscriptions.
            store: Whether it goes to the account of the role's buckets; the meter then tells of the other connection.
        """
        self.client = DirectClient()
        self.connected = False
        self.on_lost: Callable[[], None] = lambda: None
        self.on_back: Callable[[], None] = lambda: None
        self._user = store_user(bus.user) if store else bus.user
        self._is_store = store
        self._user_inbox = f"_INBOX.{subject_token(self._user or 'anonymous')}"
        self.inbox_prefix = f"{self._user_inbox}.{secrets.token_hex(8)}."
        self._bus = bus
        self._name = name
        self._echo = echo
        self._meter = meter
        self._log = log
        self._closing = False
        self._reopening: asyncio.Task[None] | None = None
        self._errors_logged: set[str] = set()
        self._last_error = "no answer"

    async def connect(self) -> None:
        """Connects.

        Raises:
            BusUnavailable: no server answered within CONNECT_S.
            BusRefused: a server refused the credentials.
        """
        refused: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

        async def on_error(error: Exception) -> None:
            if "authorization" in str(error).lower() and not refused.done():
                refused.set_result(error)
            self._on_client_error(error)

        connecting = asyncio.ensure_future(self.client.connect(**self._options(on_error)))
        either: set[asyncio.Future[Any]] = {connecting, refused}
        await asyncio.wait(either, timeout=CONNECT_S, return_when=asyncio.FIRST_COMPLETED)
        if refused.done() or not connecting.done():
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
            if refused.done():
                raise BusRefused(f"{self._servers()} refused user {self._user!r}: {refused.result()}")
            raise BusUnavailable(f"no NATS server at {self._servers()} within {CONNECT_S:.0f} s: {self._last_error}")
        try:
            connecting.result()
        except (OSError, NatsError) as error:
            raise BusUnavailable(f"{self._servers()}: {error}") from None
        self._set_connected(True)

    def _servers(self) -> str:
        return ", ".join(self._bus.servers)

    def _options(self, on_error: Callable[[Exception], Coroutine[Any, Any, None]]) -> dict[str, Any]:
        bus = self._bus
        password = bus.password
        options: dict[str, Any] = {
            "servers": bus.servers,
            "name": self._name,
            "no_echo": not self._echo,
            "error_cb": on_error,
            "disconnected_cb": self._on_disconnected,
            "reconnected_cb": self._on_reconnected,
            "closed_cb": self._on_closed,
            "inbox_prefix": self._user_inbox,
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": RECONNECT_S,
            "ping_interval": PING_S,
        }
        if self._user:
            options |= {"user": self._user, "password": password}
        if bus.tls:
            options["tls"] = bus_context(bus.tls)
        return options

    def send(self, subject: str, reply: str, headers: bytes, payload: bytes) -> bool:
        """Queues a message for the socket; False where it was dropped, which is counted."""
        if not self.connected:
            self._meter.dropped.add("disconnected")
            return False
        assert _SUBJECT.fullmatch(subject), f"{subject!r} is no subject: build subjects with Subjects"
        if not self.client.publish_now(subject, reply, headers, payload):
            self._meter.dropped.add("behind")
            return False
        return True

    async def close(self) -> None:
        """Has the server take everything, then disconnects. Idempotent."""
        if self._closing:
            return
        self._closing = True
        if self._reopening is not None:
            self._reopening.cancel()
        try:
            if self.connected:
                await self.client.flush(timeout=FLUSH_S)
        except (NatsError, OSError):
            pass  # the bus went away while we were leaving: nothing is owed to it
        await close_client(self.client)

    def _set_connected(self, connected: bool) -> None:
        self.connected = connected
        if not self._is_store:
            self._meter.connected = connected

    async def _on_disconnected(self) -> None:
        if not self.connected or self._closing:
            return
        self._set_connected(False)
        self._meter.bus_disconnects += not self._is_store
        self._log("warning", "bus_disconnected", {"user": self._user})
        self.on_lost()

    async def _on_reconnected(self) -> None:
        if self.connected or self._closing:
            return
        self._set_connected(True)
        self._log("info", "bus_reconnected", {"user": self._user})
        self.on_back()

    async def _on_closed(self) -> None:
        """The client gave this connection up because of an error that the server stated: opens another one."""
        if not self._closing:
            self._log("error", "bus_closed", {"error": str(self.client.last_error)})
            self._reopening = asyncio.get_running_loop().create_task(self._reopen())

    async def _reopen(self) -> None:
        async def on_error(error: Exception) -> None:
            self._on_client_error(error)

        await asyncio.sleep(REOPEN_S)
        await self.client.reopen(**self._options(on_error))
        await self._on_reconnected()

    def _on_client_error(self, error: Exception) -> None:
        text = self._last_error = str(error) or type(error).__name__
        refused = "permissions violation" in text.lower()
        self._meter.dropped.add("permission" if refused else "bus_error")
        if self.connected and text not in self._errors_logged and len(self._errors_logged) < ERRORS_LOGGED_MAX:
            self._errors_logged.add(text)
            self._log("warning", "bus_error", {"error": text[:500]})
