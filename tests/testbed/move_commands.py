"""Commands to a target's engine in a migration, by the answers of the source's engine."""

from typing import Any

import msgspec
from millrace.actor.engine import EngineSequence, KvLeaseTaken, PullIntoEngine, SequenceStopped
from millrace.contracts.kv import KvEndpoint, KvHandover

#: Far later than any test.
NEVER_NS = 1 << 62


def pull_of(leased: KvLeaseTaken, **changes: Any) -> PullIntoEngine:
    """Read all blocks of a lease; in time whenever that ends, unless the changes say otherwise."""
    told = {name: getattr(leased, name) for name in ("migration", "from_block", "blocks", "checksums")}
    return PullIntoEngine(**{"until_ns": NEVER_NS, **told, **changes})


def handover_of(stopped: SequenceStopped, endpoint: KvEndpoint, *, read_ms: int, **changes: Any) -> KvHandover:
    """The sequence comes with the blocks that it has where it stands still."""
    names = ("migration", "from_block", "blocks", "checksums", "computed_tokens")
    told = {name: getattr(stopped, name) for name in names}
    return KvHandover(**{"endpoint": endpoint, "read_ms": read_ms, **told, **changes})


def brought(given: EngineSequence, stopped: SequenceStopped, handover: KvHandover) -> EngineSequence:
    """The sequence as it comes to the target."""
    return msgspec.structs.replace(given, output_token_ids=stopped.output_token_ids, handover=handover)
