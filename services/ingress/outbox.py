"""Outbox of an ingress: the effects of the message being handled. No other object of the core holds effects."""

from __future__ import annotations

from collections.abc import Callable

from millrace.actor.effects import Effect


class EffectOutbox:
    """Effects in the order in which handling caused them (docs/decisions/0094-one-outbox-in-ingress.md).

    Attributes:
        emit: Adds an effect.
    """

    __slots__ = ("_effects", "emit")

    def __init__(self) -> None:
        self._effects: list[Effect] = []
        self.emit: Callable[[Effect], None] = self._effects.append

    def take(self) -> list[Effect]:
        """Return all effects, once."""
        taken = self._effects.copy()
        self._effects.clear()
        return taken
