"""JetStream KV buckets of the catalog: how they are made, for the supervisor and for a runtime that finds none."""

from __future__ import annotations

from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, KeyValueConfig, RePublish
from nats.js.errors import NotFoundError

from millrace.contracts.catalog import BUCKETS
from millrace.contracts.subjects import Subjects

#: How long the server keeps the marker that tells watchers of an expired key, seconds.
MARKER_TTL_S = 60.0

_BUCKETS = {bucket.name: bucket for bucket in BUCKETS}


async def ensure_bucket(js: JetStreamContext, *, name: str, cluster: str, replicas: int = 1) -> None:
    """Creates the catalog's bucket ``name`` of a cluster unless it is there, or makes it as it should be.

    Keys expire with the catalog's TTL, and expiry leaves a marker, so that watchers hear of it; where the catalog
    bounds the bucket's size, the oldest keys make room. A bucket that is not in the catalog has neither. The server
    tells each change on ``Subjects.changes`` and answers reads directly, so nobody needs a consumer.

    Raises:
        nats.errors.Error: JetStream did not answer, or this user may not create streams.
    """
    subjects = Subjects(cluster)
    full_name = subjects.bucket(name)
    told = RePublish(src=f"$KV.{full_name}.>", dest=f"{subjects.changes(name)}>")
    bucket = _BUCKETS.get(name)
    ttl_s, bytes_max = (bucket.ttl_s, bucket.bytes_max) if bucket is not None else (0.0, 0)
    try:
        config = (await js.stream_info(f"KV_{full_name}")).config
    except NotFoundError:
        await js.create_key_value(
            KeyValueConfig(
                bucket=full_name,
                history=1,
                ttl=ttl_s or None,
                max_bytes=bytes_max or None,
                replicas=replicas,
                limit_marker_ttl=MARKER_TTL_S if ttl_s else None,
                direct=True,
                republish=told,
            )
        )
        if not bytes_max:
            return
        config = (await js.stream_info(f"KV_{full_name}")).config
    discard = DiscardPolicy.OLD if bytes_max else DiscardPolicy.NEW
    if (config.allow_direct, config.republish, config.discard) != (True, told, discard):
        await js.update_stream(config, allow_direct=True, republish=told, discard=discard)
