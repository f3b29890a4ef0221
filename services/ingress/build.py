"""Build the ingress's actor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from millrace.actor.deps import ActorDeps

from services.ingress.actor import IngressActor
from services.ingress.cascade.entry import LearntEntry
from services.ingress.config import IngressConfig, policy_of
from services.ingress.metrics import IngressMetrics
from services.ingress.tokens.detokenizer import TextModel


@dataclass(frozen=True, kw_only=True)
class IngressDeps(ActorDeps):
    """Dependencies of an ingress beside its configuration.

    Attributes:
        models: Vocabulary of each model that it serves, by the model's name.
        entries: Fitted choice of tiers by prompt, by the cascade's name.
    """

    models: Mapping[str, TextModel]
    entries: Mapping[str, LearntEntry] = field(default_factory=dict)


def build(config: IngressConfig, deps: IngressDeps) -> IngressActor:
    """The actor of a configuration.

    Raises:
        ConfigError: the dispatch policy or its parameters are wrong.
    """
    actor = IngressActor(
        config=config,
        incarnation=deps.incarnation,
        models=deps.models,
        metrics=IngressMetrics(deps.registry),
        rng=deps.rng,
        policy=policy_of(config.dispatch),
    )
    actor.state.entries.update(deps.entries)
    return actor
