"""Build the ingress's actor."""

from __future__ import annotations

from services.ingress.actor import IngressActor
from services.ingress.config import IngressConfig
from services.ingress.state import IngressDeps


def build(config: IngressConfig, deps: IngressDeps) -> IngressActor:
    """The actor of a configuration.

    Raises:
        ConfigError: the dispatch policy or its parameters are wrong.
    """
    return IngressActor(config, deps)
