"""Entry of a request: the tier of its cascade at which it starts, and how far it may go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from millrace.cascade.entry import EntryModel, choose_tiers, prompt_features


class EntryDecision(msgspec.Struct, frozen=True):
    """Decision on where a request enters.

    Attributes:
        tier: Position of a usable tier.
        last: Highest position that is asked for a better answer; None for the plan's last. Where a tier up to it fails,
            higher ones are asked all the same.
    """

    tier: int
    reason: str
    last: int | None = None


class LearntEntry:
    """The choice by the prompt alone, fitted to recorded answers of a cascade's models (``millrace train entry``).

    Raises:
        ValueError: the model has no costs, or another number of tiers.
    """

    def __init__(self, model: EntryModel, tiers: Sequence[str]) -> None:
        """``tiers``: served names of the models it was fitted to, in its order."""
        if len(tiers) != len(model.file.models) or len(model.file.costs) != len(tiers):
            raise ValueError(f"fitted to {', '.join(model.file.models)} with their costs, not to {', '.join(tiers)}")
        self._model = model
        self._positions = {name: index for index, name in enumerate(tiers)}

    def choose(
        self, tiers: Sequence[str], usable: Sequence[int], prompt_head: str, prompt_tokens: int
    ) -> EntryDecision | None:
        """The first and last usable tier of greatest expected value less cost; None without text, or where the model of
        one of the plan's tiers is unknown.
        """
        if not prompt_head or any(name not in self._positions for name in tiers):
            return None
        row = np.array(prompt_features(prompt_head, max(1, prompt_tokens)), dtype=np.float64)
        known = [self._positions[tiers[position]] for position in usable]
        return choose_entry(
            self._model.probabilities(row)[known].tolist(),
            [self._model.file.costs[index] for index in known],
            usable,
            value=self._model.file.value,
        )


def choose_entry(
    chances: Sequence[float], costs: Sequence[float], usable: Sequence[int], *, value: float
) -> EntryDecision:
    """The decision of greatest expected value less cost, by chances and costs of the usable tiers."""
    first, last = choose_tiers(np.array([chances]), np.array(costs), value=value)
    text = ", ".join(f"{chance:.2f}" for chance in chances)
    return EntryDecision(usable[int(first[0])], f"by the prompt: right with {text}", usable[int(last[0])])


def enter(
    policy: Literal["first", "given", "learnt"],
    usable: Sequence[int],
    *,
    given: int | None,
    learnt: EntryDecision | None = None,
) -> EntryDecision:
    """The tier by one of the entry policies.

    ``first``: the cheapest usable tier, whatever the client says. ``given``: the tier that the client names, or the
    next usable one above it, or else the highest usable one below it; the cheapest one where it names none. ``learnt``:
    the same, but by the prompt where the client names none and a fitted choice has something to say.

    Args:
        usable: Positions of the tiers that can answer, rising; at least one.
        given: Tier that the client names; None where it names none.
        learnt: The fitted choice.
    """
    if policy == "first" or (given is None and (policy == "given" or learnt is None)):
        return EntryDecision(usable[0], "first usable tier")
    if given is None:
        assert learnt is not None
        return learnt
    above = next((tier for tier in usable if tier >= given), None)
    if above is not None:
        return EntryDecision(above, f"client asks for tier {given}")
    return EntryDecision(usable[-1], f"no tier from {given} on is usable")
