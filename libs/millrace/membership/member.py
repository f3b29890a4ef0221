"""One instance as an observer sees it: its state, and the table that says which event leads to which state.

    | state    | started | reported | reported_draining | leaving  | silence | died | unregistered |
    |----------|---------|----------|-------------------|----------|---------|------|--------------|
    | unknown  | serving | serving  | draining          | draining | unknown | dead | gone         |
    | serving  | serving | serving  | draining          | draining | silent  | dead | serving      |
    | draining | serving | serving  | draining          | draining | silent  | dead | gone         |
    | silent   | serving | serving  | draining          | draining | silent  | dead | gone         |
    | dead     | serving | dead     | dead              | dead     | dead    | dead | gone         |
    | gone     | serving | serving  | draining          | gone     | gone    | dead | gone         |

``started`` is a new incarnation; all other events are those of the present one. A serving instance whose record
disappears stays: the store may have lost the record, and the summaries still come. An observer that needs the record
reads ``Member.record``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from millrace.actor.transitions import Transition, TransitionTable
from millrace.contracts.status import InstanceRecord, InstanceSummary


class MemberState(StrEnum):
    """State of an instance as an observer sees it."""

    UNKNOWN = "unknown"  # named by a plan, never heard
    SERVING = "serving"  # takes new work
    DRAINING = "draining"  # finishes or moves what it has, takes no new work
    SILENT = "silent"  # not heard for longer than the threshold
    DEAD = "dead"  # its process was seen to end
    GONE = "gone"  # it left: not registered, and draining, silent or dead before that


class MemberEvent(StrEnum):
    """Event in the life cycle of an instance."""

    STARTED = "started"
    REPORTED = "reported"
    REPORTED_DRAINING = "reported_draining"
    LEAVING = "leaving"
    SILENCE = "silence"
    DIED = "died"
    UNREGISTERED = "unregistered"


_S, _E = MemberState, MemberEvent

#: The table above; an event that is not listed leaves the state as it is.
MEMBER_TRANSITIONS = TransitionTable[MemberState, MemberEvent, None, None](
    Transition(_S.UNKNOWN, _E.STARTED, _S.SERVING, None),
    Transition(_S.UNKNOWN, _E.REPORTED, _S.SERVING, None),
    Transition(_S.UNKNOWN, _E.REPORTED_DRAINING, _S.DRAINING, None),
    Transition(_S.UNKNOWN, _E.LEAVING, _S.DRAINING, None),
    Transition(_S.UNKNOWN, _E.DIED, _S.DEAD, None),
    Transition(_S.UNKNOWN, _E.UNREGISTERED, _S.GONE, None),
    #
    Transition(_S.SERVING, _E.REPORTED_DRAINING, _S.DRAINING, None),
    Transition(_S.SERVING, _E.LEAVING, _S.DRAINING, None),
    Transition(_S.SERVING, _E.SILENCE, _S.SILENT, None),
    Transition(_S.SERVING, _E.DIED, _S.DEAD, None),
    #
    Transition(_S.DRAINING, _E.STARTED, _S.SERVING, None),
    Transition(_S.DRAINING, _E.REPORTED, _S.SERVING, None),
    Transition(_S.DRAINING, _E.SILENCE, _S.SILENT, None),
    Transition(_S.DRAINING, _E.DIED, _S.DEAD, None),
    Transition(_S.DRAINING, _E.UNREGISTERED, _S.GONE, None),
    #
    Transition(_S.SILENT, _E.STARTED, _S.SERVING, None),
    Transition(_S.SILENT, _E.REPORTED, _S.SERVING, None),
    Transition(_S.SILENT, _E.REPORTED_DRAINING, _S.DRAINING, None),
    Transition(_S.SILENT, _E.LEAVING, _S.DRAINING, None),
    Transition(_S.SILENT, _E.DIED, _S.DEAD, None),
    Transition(_S.SILENT, _E.UNREGISTERED, _S.GONE, None),
    #
    Transition(_S.DEAD, _E.STARTED, _S.SERVING, None),
    Transition(_S.DEAD, _E.UNREGISTERED, _S.GONE, None),
    #
    Transition(_S.GONE, _E.STARTED, _S.SERVING, None),
    Transition(_S.GONE, _E.REPORTED, _S.SERVING, None),
    Transition(_S.GONE, _E.REPORTED_DRAINING, _S.DRAINING, None),
    Transition(_S.GONE, _E.DIED, _S.DEAD, None),
)


def next_state(state: MemberState, event: MemberEvent) -> MemberState:
    """State after an event, by the table of this module."""
    rows = MEMBER_TRANSITIONS.rows(state, event)
    return rows[0].target if rows else state


@dataclass(slots=True, eq=False)
class Member:
    """One instance. Only ``Membership`` changes it.

    Attributes:
        token: Its name as one subject token: the key under which it is registered.
        name: Its name; the token until a record or summary names it.
        incarnation: Newest one that showed itself, unix ns; 0 before.
        record: Last registration; None where there is none, or it was deleted.
        summary: Last one of this incarnation; None before the first.
        heard_ns: When the last sign of life came, by the observer's clock; 0 before.
        dead_through: Incarnations up to this one have ended.
    """

    token: str
    name: str
    state: MemberState = MemberState.UNKNOWN
    incarnation: int = 0
    record: InstanceRecord | None = None
    summary: InstanceSummary | None = None
    heard_ns: int = 0
    dead_through: int = 0

    @property
    def serving(self) -> bool:
        return self.state is MemberState.SERVING

    @property
    def summary_drains(self) -> bool:
        return self.summary is not None and self.summary.draining

    def silence_ns(self, now_ns: int) -> int:
        return now_ns - self.heard_ns
