"""A nats-server with the users of every role, as `millrace up` configures it, and connections as any of them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
from millrace.contracts.catalog import Role
from millrace.contracts.subjects import Subjects
from millrace.supervision.nats_config import NatsServerOptions, nats_config
from nats.aio.client import Client

from tests.testbed.nats_process import NatsProcess

PASSWORDS = {role: f"secret-of-{role}" for role in Role}
SUBJECTS = Subjects("local")


def role_server(folder: Path, **options: Any) -> NatsProcess:
    """The server, which has not begun."""
    return NatsProcess(folder, nats_config(NatsServerOptions(store_dir=str(folder / "js"), **options), PASSWORDS))


@asynccontextmanager
async def connected(url: str, user: str, errors: list[str] | None = None) -> AsyncIterator[Client]:
    """A connection as a role's user of the bus or of the store; ``errors`` takes what the server complains of."""

    async def note(error: Exception) -> None:
        if errors is not None:
            errors.append(str(error))

    password, prefix = PASSWORDS[Role(user.removesuffix("-store"))], f"_INBOX.{user}".encode()
    client = await nats.connect(
        url, user=str(user), password=password, error_cb=note, inbox_prefix=prefix, max_reconnect_attempts=0
    )
    try:
        yield client
    finally:
        await client.close()


def example(subject: str, word: str = "x") -> str:
    """A subject of the catalog, with a word for what it leaves open."""
    tokens = [word if token.startswith("{") else token for token in subject.split(".")]
    return ".".join([SUBJECTS.prefix, *tokens])
