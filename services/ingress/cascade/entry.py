"""Entry policies: the tier at which a request enters a cascade. Pure functions by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec


class EntryView(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of an entry policy.

    Attributes:
        usable: Positions of the tiers that can answer, rising; at least one.
        given: Tier that the client names; None where it names none.
        prompt_tokens: Of the first tier's tokenizer, all prompts together.
        prompt_head: First 2,048 characters of the rendered prompt; empty where the client sent token ids.
    """

    usable: tuple[int, ...]
    given: int | None = None
    prompt_tokens: int = 0
    prompt_head: str = ""


class EntryDecision(msgspec.Struct, frozen=True):
    """Position of a usable tier, and why it was chosen."""

    tier: int
    reason: str


def enter_first(view: EntryView) -> EntryDecision:
    """The cheapest usable tier, whatever the client says."""
    return EntryDecision(view.usable[0], "first usable tier")


def enter_given(view: EntryView) -> EntryDecision:
    """The tier that the client names, or the next usable one above it; the cheapest one where it names none.

    Where none above the named one is usable, the highest usable one below it answers.
    """
    if view.given is None:
        return enter_first(view)
    above = [tier for tier in view.usable if tier >= view.given]
    if above:
        return EntryDecision(above[0], f"client asks for tier {view.given}")
    return EntryDecision(view.usable[-1], f"no tier from {view.given} on is usable")


EntryPolicy = Callable[[EntryView], EntryDecision]

ENTRY_POLICIES: Mapping[str, EntryPolicy] = {"first": enter_first, "given": enter_given}
