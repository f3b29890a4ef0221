"""Builds the tagger's actor."""

from __future__ import annotations

from millrace.actor.deps import ActorDeps

from services.tagger.actor import TaggerActor
from services.tagger.config import TaggerConfig
from services.tagger.metrics import TaggerMetrics


def build(config: TaggerConfig, deps: ActorDeps) -> TaggerActor:
    """The actor of a configuration."""
    return TaggerActor(
        name=config.name,
        cluster=config.bus.cluster,
        incarnation=deps.incarnation,
        learning=config.learning,
        metrics=TaggerMetrics(deps.registry),
    )
