"""Builds the actor of a recording again, for `millrace replay`."""

from __future__ import annotations

import msgspec

from services.tagger.actor import TaggerActor
from services.tagger.config import TaggerConfig


def replay_actor(config: str, seed: int) -> TaggerActor:
    """The actor as it was when the recording began; ``seed`` is its incarnation."""
    known = msgspec.json.decode(config, type=TaggerConfig)
    return TaggerActor(name=known.name, cluster=known.bus.cluster, incarnation=seed, learning=known.learning)
