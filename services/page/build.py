"""Builds the page's actor."""

from __future__ import annotations

from millrace.actor.deps import ActorDeps

from services.page.actor import PageActor
from services.page.config import PageConfig


def build(config: PageConfig, deps: ActorDeps) -> PageActor:
    """The actor of a configuration."""
    return PageActor(config, incarnation=deps.incarnation)
