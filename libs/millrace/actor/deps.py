"""Dependencies that every actor is built with, beside its configuration.

Each service has ``build(config, deps)`` in ``services/<name>/build.py``. Its ``__main__`` and the simulator
call it; nothing else constructs an actor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from prometheus_client import CollectorRegistry


@dataclass(frozen=True, kw_only=True)
class ActorDeps:
    """Dependencies that all services share. A service that needs more derives its own from this.

    Attributes:
        incarnation: Start of the process, unix ns.
        rng: Source of the actor's random choices.
        registry: Where its metrics are registered; None where nobody scrapes them.
        clock: Counts nanoseconds, to measure what handling takes; a constant where nobody measures.
    """

    incarnation: int
    rng: Random
    registry: CollectorRegistry | None = None
    clock: Callable[[], int] = int


def actor_rng(name: str, incarnation: int) -> Random:
    """The random source of an actor: its name and incarnation say which, so that a test draws the same."""
    return Random(f"{name}-{incarnation}")
