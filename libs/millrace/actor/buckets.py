"""JetStream KV buckets of the catalog: how they are made, for the supervisor and for a runtime that finds none."""

from __future__ import annotations

from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig
from nats.js.errors import NotFoundError

from millrace.contracts.catalog import BUCKETS

#: How long the server keeps the marker that tells watchers of an expired key, seconds.
MARKER_TTL_S = 60.0

_TTL_S = {bucket.name: bucket.ttl_s for bucket in BUCKETS}


async def ensure_bucket(js: JetStreamContext, *, name: str, full_name: str, replicas: int = 1) -> None:
    """Creates the KV bucket ``full_name`` for the catalog's bucket ``name`` unless it is there.

    Keys expire with the catalog's TTL, and expiry leaves a marker, so that watchers hear of it. A bucket that is not
    in the catalog has no TTL.

    Raises:
        nats.errors.Error: JetStream did not answer, or this user may not create streams.
    """
    try:
        await js.stream_info(f"KV_{full_name}")
    except NotFoundError:
        ttl_s = _TTL_S.get(name, 0.0)
        config = KeyValueConfig(
            bucket=full_name,
            history=1,
            ttl=ttl_s or None,
            replicas=replicas,
            limit_marker_ttl=MARKER_TTL_S if ttl_s else None,
            direct=True,  # bucket_reading.py
        )
        await js.create_key_value(config)


async def allow_direct_reads(js: JetStreamContext, *, full_name: str) -> None:
    """Let a bucket that an earlier version created be read without a consumer (bucket_reading.py).

    Raises:
        nats.errors.Error: as ``ensure_bucket``; only the supervisor may change streams.
    """
    info = await js.stream_info(f"KV_{full_name}")
    if not info.config.allow_direct:
        await js.update_stream(info.config, allow_direct=True)
