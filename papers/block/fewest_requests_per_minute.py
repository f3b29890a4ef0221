"""Fewest requests per minute: whoever was given least in the last 60 seconds."""

from __future__ import annotations

from random import Random

import msgspec
from millrace.policies.dispatch.pick import pick_lowest
from millrace.policies.dispatch.view import Decision, DispatchView

_SECOND_NS = 1_000_000_000
#: Instances whose counts are kept. More than any plan holds; beyond it the ones that are no candidates are forgotten.
INSTANCES_MAX = 4096


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Length of the window that is counted.

    Attributes:
        window_s: Seconds, 1 to 600.
    """

    window_s: int = 60


class State(msgspec.Struct, frozen=True):
    """Sequences given in the window.

    Attributes:
        second: Unix second of the newest slot.
        slots: Per second of the window with any placement: (second, instance -> sequences), oldest first.
        totals: Instance -> sequences in the whole window.
    """

    second: int = 0
    slots: tuple[tuple[int, dict[str, int]], ...] = ()
    totals: dict[str, int] = {}


def decide(
    view: DispatchView, parameters: Parameters, state: State, now_ns: int, rng: Random
) -> tuple[Decision, State]:
    """The candidate with the lowest count; equal ones by ``rng``. Summaries are not looked at."""
    state = _advance(state, now_ns // _SECOND_NS, parameters.window_s)
    totals = state.totals
    loads = [totals.get(c.name, 0) for c in view.candidates]
    decision = pick_lowest(view, loads, rng, unit=f"requests in the last {parameters.window_s} s")
    if decision.chosen is None:
        return decision, state
    return decision, _count(state, decision.chosen, view.sequences)


def _advance(state: State, second: int, window_s: int) -> State:
    """Drops the slots that left the window; happens at most once a second."""
    if second == state.second:
        return state
    oldest = second - window_s
    kept = tuple(slot for slot in state.slots if slot[0] > oldest)
    totals: dict[str, int] = {}
    for _, counts in kept:
        for name, count in counts.items():
            totals[name] = totals.get(name, 0) + count
    return State(second, kept, totals if len(totals) <= INSTANCES_MAX else {})


def _count(state: State, name: str, sequences: int) -> State:
    newest: dict[str, int] = {}
    older = state.slots
    if older and older[-1][0] == state.second:
        newest = older[-1][1]
        older = older[:-1]
    slot = {**newest, name: newest.get(name, 0) + sequences}
    totals = {**state.totals, name: state.totals.get(name, 0) + sequences}
    return State(state.second, (*older, (state.second, slot)), totals)
