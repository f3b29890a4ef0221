"""A read-only connection to the bus for the verbs that look on."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import nats
import nats.errors
from nats.aio.client import Client

from millrace.actor.bus_tls import bus_context
from millrace.actor.errors import ConfigError
from millrace.actor.nats_client import close_client
from millrace.cli.cluster import ConnectionSettings
from millrace.cli.errors import CliError
from millrace.contracts.permissions import store_user
from millrace.contracts.subjects import subject_token

#: One attempt at the first connection; a person waits for it.
CONNECT_S = 3

#: Pause between attempts to come back after the server went away.
RECONNECT_S = 0.25


@asynccontextmanager
async def open_bus(
    connection: ConnectionSettings,
    *,
    on_state: Callable[[str], None] | None = None,
    store: bool = False,
) -> AsyncIterator[Client]:
    """Connects, and comes back by itself whenever the server does.

    Args:
        on_state: Told ``disconnected`` and ``reconnected``.
        store: Whether to connect to the buckets, which a user of the bus does not reach.

    Raises:
        CliError: no server answers there, or it refuses the user.
    """
    errors: deque[Exception] = deque(maxlen=8)
    closing = False

    async def on_error(error: Exception) -> None:
        errors.append(error)

    async def tell(state: str) -> None:
        if on_state is not None and not closing:
            on_state(state)

    client = Client()
    user = store_user(connection.user) if store and connection.user else connection.user
    try:
        await client.connect(
            connection.url.split(","),
            user=user or None,
            password=connection.password or None,
            name="millrace-cli",
            # Each user may listen to its own inbox only.
            inbox_prefix=f"_INBOX.{subject_token(user or 'anonymous')}",
            tls=bus_context(connection.tls),
            connect_timeout=CONNECT_S,
            allow_reconnect=True,
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            error_cb=on_error,
            disconnected_cb=partial(tell, "disconnected"),
            reconnected_cb=partial(tell, "reconnected"),
        )
    except (OSError, ConfigError, nats.errors.Error, ValueError) as error:
        raise CliError(_explain(connection, [*errors, error])) from None
    # Given to connect() this would make the first connection, too, try for ever.
    client.options["max_reconnect_attempts"] = -1
    client.options["reconnect_time_wait"] = RECONNECT_S
    try:
        yield client
    finally:
        closing = True
        await close_client(client)


def _explain(connection: ConnectionSettings, errors: list[Exception]) -> str:
    text = " ".join(str(error) for error in errors).lower()
    if "authorization" in text or "authentication" in text:
        who = connection.user or "(no user given)"
        return f"the NATS server at {connection.url} refuses user {who}; see --user and --password"
    return f"no NATS server answers at {connection.url} (from {connection.origin}); is the cluster up?"
