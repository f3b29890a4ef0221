"""Reads every value of a KV bucket with one request and no JetStream consumer.

A user that only looks on needs no right to create consumers: a consumer delivers wherever its creator says, and lives
on in the server. A direct get with ``multi_last`` (nats-server 2.11) answers with the last message of each key.
"""

from __future__ import annotations

import json

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

#: Values of one answer. A cluster has hundreds of instances.
KEYS_MAX = 10_000

#: An answer comes in messages; so long between two of them means that it broke off.
PAUSE_S = 1.0

_STATUS = "Status"
_END, _EMPTY = "204", "404"
_DELETED = ("KV-Operation", "Nats-Marker-Reason")


class BucketUnreadable(NatsError):
    """The server did not give a bucket's values: no JetStream, no such bucket, or no direct reads of it."""


async def read_bucket(client: Client, full_name: str) -> list[bytes]:
    """Every value that stands in the bucket now, in the order of writing. Deleted and expired keys are left out.

    Raises:
        BucketUnreadable: the server refused, or the answer broke off.
        nats.errors.Error: the connection is down.
    """
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox)
    try:
        question = {"multi_last": [f"$KV.{full_name}.>"], "batch": KEYS_MAX}
        await client.publish(f"$JS.API.DIRECT.GET.KV_{full_name}", json.dumps(question).encode(), reply=inbox)
        values: list[bytes] = []
        while True:
            try:
                message = await subscription.next_msg(PAUSE_S)
            except TimeoutError as error:
                raise BucketUnreadable(f"{full_name}: no answer") from error
            if _ends(message, full_name):
                return values
            if not any(header in (message.headers or {}) for header in _DELETED):
                values.append(message.data)
    finally:
        await subscription.unsubscribe()


def _ends(message: Msg, full_name: str) -> bool:
    """Whether it is the last message of an answer. Raises BucketUnreadable where it says that there is none."""
    status = (message.headers or {}).get(_STATUS)
    if status in (_END, _EMPTY):
        return True
    if status is not None:
        raise BucketUnreadable(f"{full_name}: status {status}")
    return False
