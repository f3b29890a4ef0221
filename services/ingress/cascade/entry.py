"""Entry policies: the tier at which a request enters a cascade. Pure functions by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import numpy as np
from millrace.cascade.entry import choose_tiers


class PromptEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Expectations of a prompt, by position of the plan's tiers.

    Attributes:
        chances: That each model's answer is right.
        costs: Of an attempt, any unit.
        value: Of a right answer, in the same unit.
    """

    chances: tuple[float, ...]
    costs: tuple[float, ...]
    value: float


class EntryView(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of an entry policy.

    Attributes:
        usable: Positions of the tiers that can answer, rising; at least one.
        given: Tier that the client names; None where it names none.
        prompt_tokens: Of the first tier's tokenizer, all prompts together.
        prompt_head: First 2,048 characters of the rendered prompt; empty where the client sent token ids.
        estimate: By a model that was fitted to these tiers; None where there is none, or no text.
    """

    usable: tuple[int, ...]
    given: int | None = None
    prompt_tokens: int = 0
    prompt_head: str = ""
    estimate: PromptEstimate | None = None


class EntryDecision(msgspec.Struct, frozen=True):
    """Decision on where a request enters.

    Attributes:
        tier: Position of a usable tier.
        reason: For a person.
        last: Highest position that is asked for a better answer; None for the plan's last. Where a tier up to it fails,
            higher ones are asked all the same.
    """

    tier: int
    reason: str
    last: int | None = None


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


def enter_learnt(view: EntryView) -> EntryDecision:
    """The first and last usable tier of greatest expected value less cost, by the prompt; a client's choice wins.

    Without an estimate, the cheapest usable tier.
    """
    if view.given is not None or view.estimate is None:
        return enter_given(view)
    told, usable = view.estimate, list(view.usable)
    chances = np.array([[told.chances[tier] for tier in usable]])
    costs = np.array([told.costs[tier] for tier in usable])
    first, last = choose_tiers(chances, costs, value=told.value)
    text = ", ".join(f"{chance:.2f}" for chance in chances[0])
    return EntryDecision(usable[int(first[0])], f"by the prompt: right with {text}", usable[int(last[0])])


EntryPolicy = Callable[[EntryView], EntryDecision]

ENTRY_POLICIES: Mapping[str, EntryPolicy] = {"first": enter_first, "given": enter_given, "learnt": enter_learnt}
