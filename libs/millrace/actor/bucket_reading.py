"""Reads the values of a KV bucket in the order of writing, without a JetStream consumer.

A direct get (nats-server 2.11) answers with one message a value, from a revision on. Buckets keep no history, so these
are the last values of all keys.
"""

from __future__ import annotations

import json

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

#: Values of one answer; more are asked for then.
BATCH = 500

#: An answer comes in messages; so long between two of them means that it broke off.
PAUSE_S = 1.0

_STATUS = "Status"
_END, _EMPTY = "204", "404"
_DELETED = ("KV-Operation", "Nats-Marker-Reason")


class BucketUnreadable(NatsError):
    """The server did not give a bucket's values: no JetStream, no such bucket, or no direct reads of it."""


def question(full_name: str, revision: int) -> bytes:
    """Asks for values from a revision on."""
    return json.dumps({"seq": revision, "next_by_subj": f"$KV.{full_name}.>", "batch": BATCH}).encode()


async def read_bucket(client: Client, full_name: str) -> list[bytes]:
    """Every value that stands in the bucket now, in the order of writing. Deleted and expired keys are left out.

    Raises:
        BucketUnreadable: the server refused, or the answer broke off.
        nats.errors.Error: the connection is down.
    """
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox)
    try:
        values: list[bytes] = []
        revision = 0
        while True:
            await client.publish(f"$JS.API.DIRECT.GET.KV_{full_name}", question(full_name, revision + 1), reply=inbox)
            while True:
                try:
                    message = await subscription.next_msg(PAUSE_S)
                except TimeoutError as error:
                    raise BucketUnreadable(f"{full_name}: no answer") from error
                headers = message.headers or {}
                if _ends(message, full_name):
                    break
                revision = int(headers["Nats-Sequence"])
                if not any(header in headers for header in _DELETED):
                    values.append(message.data)
            if int(headers.get("Nats-Num-Pending", 0)) == 0:
                return values
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
