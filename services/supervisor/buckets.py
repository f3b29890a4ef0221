"""Creates the JetStream KV buckets of a cluster, as the catalog says.

`python -m services.supervisor.buckets --config FILE` (a BusConfig) does it alone, where no supervisor runs: in
containers.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import nats
from millrace.actor.buckets import ensure_bucket
from millrace.actor.bus_tls import bus_context
from millrace.actor.config import BusConfig, load_config
from millrace.actor.errors import BusError, BusUnavailable, ConfigError
from millrace.actor.nats_client import close_client
from millrace.contracts.catalog import BUCKETS
from millrace.contracts.permissions import store_user


async def create_buckets(bus: BusConfig, *, replicas: int = 1) -> None:
    """Creates every bucket that is not there.

    Raises:
        BusUnavailable: no server, or JetStream does not answer.
    """
    user = store_user(bus.user) if bus.user else None
    inbox = f"_INBOX.{user}" if user else "_INBOX"
    try:
        client = await nats.connect(
            bus.servers,
            user=user,
            password=bus.password or None,
            inbox_prefix=inbox,
            tls=bus_context(bus.tls),
            connect_timeout=5,
        )
    except (OSError, nats.errors.Error) as error:
        raise BusUnavailable(f"{bus.servers[0]}: {error}") from None
    try:
        stream = client.jetstream()
        for bucket in BUCKETS:
            await ensure_bucket(stream, name=bucket.name, cluster=bus.cluster, replicas=replicas)
    except nats.errors.Error as error:
        raise BusUnavailable(f"JetStream: {error}") from None
    finally:
        await close_client(client)


def main() -> int:
    """Creates them once; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m services.supervisor.buckets")
    parser.add_argument("--config", required=True)
    parser.add_argument("--replicas", type=int, default=1, help="servers that keep each bucket")
    asked = parser.parse_args()
    try:
        asyncio.run(create_buckets(load_config(BusConfig, asked.config), replicas=asked.replicas))
    except (BusError, ConfigError) as error:
        print(f"buckets: {error}", file=sys.stderr)  # noqa: T201  # there is no logger in this one-shot
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
