"""The instances of a cluster as one observer sees them.

| input | meaning |
|---|---|
| record | registration; one of a new incarnation is a sign of life, a repeated one is not (it may have been read from the store long after the process ended), a deleted one ends only what does not report |
| summary, snapshot, tokens | sign of life; those of older or ended incarnations are ignored |
| presence DEAD of a worker | incarnations up to the one named have ended |
| presence LEAVING, sequences handed back | draining, until a summary says otherwise |
| ``expire`` | silence: a transition, which an observer does not make while its own connection is down |

Invariants: at most ``members_max`` members; incarnations never fall; a summary is of the present incarnation.
Overload: beyond ``members_max`` those that are expendable make room (by default the unregistered ones that are gone or
were never heard), then new ones are ignored.
"""  # noqa: E501  (a table's row is one line)

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from millrace.contracts.status import InstanceRecord, InstanceSummary, PresenceState, ServicePresence
from millrace.contracts.subjects import subject_token
from millrace.membership.config import MembershipConfig
from millrace.membership.member import Member, MemberEvent, MemberState, next_state

#: The role of presences that tell of instances.
_WORKER = "worker"


class MembershipChange(NamedTuple):
    """Effect of one input.

    Attributes:
        member: The member concerned; None if the name is unknown.
        accepted: Whether it counted; late, replayed, forged and surplus inputs do not.
        before: State before it; UNKNOWN where there was no member.
        restarted: Whether an earlier incarnation, and all that it held, is lost by it.
        rerecorded: Whether the record is another one than before.
    """

    member: Member | None = None
    accepted: bool = False
    before: MemberState = MemberState.UNKNOWN
    restarted: bool = False
    rerecorded: bool = False

    @property
    def moved(self) -> bool:
        return self.member is not None and self.member.state is not self.before


class Membership:
    """All instances that one observer knows, by subject token."""

    def __init__(
        self, *, silence_ns: int, members_max: int, expendable: Callable[[Member], bool] | None = None
    ) -> None:
        """Start without members.

        Args:
            silence_ns: Time without a sign of life after which ``expire`` makes an instance silent.
            expendable: Whether an unregistered member may be dropped to make room; None for those that are gone or
                were never heard.
        """
        self.silence_ns = silence_ns
        self._members_max = members_max
        self._expendable = expendable or _idle
        self._members: dict[str, Member] = {}

    @classmethod
    def of(cls, config: MembershipConfig, *, expendable: Callable[[Member], bool] | None = None) -> Membership:
        """The membership of a service that sends work to instances."""
        return cls(silence_ns=config.instance_silence_ns, members_max=config.members_max, expendable=expendable)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def find(self, name: str) -> Member | None:
        return self._members.get(subject_token(name)) if name else None

    def registered(self) -> Iterator[tuple[Member, InstanceRecord]]:
        return ((member, member.record) for member in self if member.record is not None)

    # inputs

    def expect(self, name: str) -> Member | None:
        """A plan names it. None where there is no room for one more."""
        return self._get(name)

    def on_record(self, key: str, record: InstanceRecord | None, now_ns: int) -> MembershipChange:
        """A registration is new, repeated, changed or deleted (None)."""
        if record is None:
            return self._on_deleted(key)
        member = self._get(record.instance) if subject_token(key) == subject_token(record.instance or "-") else None
        if member is None or record.incarnation < member.incarnation:
            return _ignored(member)
        before, rerecorded = member.state, record != member.record
        member.record = record
        restarted = self._observe(member, record.incarnation, now_ns)
        return MembershipChange(member, True, before, restarted, rerecorded)

    def on_summary(self, summary: InstanceSummary, now_ns: int) -> MembershipChange:
        """A heartbeat of an instance."""
        member = self._get(summary.instance)
        if member is None or summary.incarnation < member.incarnation or summary.incarnation <= member.dead_through:
            return _ignored(member)
        known = member.summary
        if known is not None and summary.incarnation == known.incarnation and summary.at_ns <= known.at_ns:
            return _ignored(member)
        before = member.state
        restarted = self._observe(member, summary.incarnation, now_ns)
        member.summary, member.heard_ns = summary, now_ns
        if summary.draining or member.state is not MemberState.SERVING:  # else it stays so, as nearly all do
            _apply(member, MemberEvent.REPORTED_DRAINING if summary.draining else MemberEvent.REPORTED)
        return MembershipChange(member, True, before, restarted)

    def observe(self, name: str, incarnation: int, now_ns: int) -> MembershipChange:
        """An incarnation showed itself: by a snapshot or by tokens. It says nothing of draining."""
        member = self._get(name)
        if member is None or incarnation < member.incarnation or incarnation <= member.dead_through:
            return _ignored(member)
        before = member.state
        restarted = self._observe(member, incarnation, now_ns)
        member.heard_ns = now_ns
        if member.state in (MemberState.SILENT, MemberState.GONE):
            _apply(member, MemberEvent.REPORTED_DRAINING if member.summary_drains else MemberEvent.REPORTED)
        return MembershipChange(member, True, before, restarted)

    def on_presence(self, presence: ServicePresence) -> MembershipChange:
        """A worker leaves, or its process was seen to end. Other presences change nothing."""
        member = self.find(presence.name)
        if member is None or presence.role != _WORKER or presence.state is PresenceState.ALIVE:
            return _ignored(member)
        if presence.state is PresenceState.DEAD:
            return self._on_dead(member, presence.incarnation or presence.at_ns)
        before = member.state
        if presence.incarnation != member.incarnation:
            return _ignored(member)
        _apply(member, MemberEvent.LEAVING)
        return MembershipChange(member, True, before)

    def withdraw(self, name: str) -> MembershipChange:
        """It handed sequences back: no new work until its next summary."""
        member = self.find(name)
        if member is None:
            return MembershipChange()
        before = member.state
        _apply(member, MemberEvent.LEAVING)
        return MembershipChange(member, True, before)

    def forget(self, name: str) -> None:
        self._members.pop(subject_token(name), None)

    # time

    def state(self, member: Member, now_ns: int) -> MemberState:
        """State now, its silence included."""
        if now_ns - member.heard_ns > self.silence_ns:
            self._expire(member, now_ns)
        return member.state

    def expire(self, now_ns: int) -> list[Member]:
        """Make silent whoever was not heard for ``silence_ns``. Returns those that were not silent before."""
        return [member for member in self if self._expire(member, now_ns)]

    def restart_timers(self, now_ns: int) -> None:
        """The observer's connection is back: silence so far was its own."""
        for member in self:
            member.heard_ns = max(member.heard_ns, now_ns)

    def excuse(self, still_ns: int, now_ns: int) -> None:
        """The observer itself stood still for so long, and heard nobody: that was no silence of theirs."""
        for member in self:
            member.heard_ns = min(now_ns, member.heard_ns + still_ns)

    def check_invariants(self) -> None:
        assert len(self) <= self._members_max
        for token, member in self._members.items():
            assert token == member.token
            _check_member(member)

    def check_member(self, name: str) -> None:
        """Raise AssertionError where the facts about one member contradict each other."""
        member = self.find(name)
        if member is not None:
            assert member.token == subject_token(name)
            _check_member(member)

    # inside

    def _get(self, name: str) -> Member | None:
        if not name:
            return None
        token = subject_token(name)
        member = self._members.get(token)
        if member is None:
            if len(self._members) >= self._members_max:
                self._make_room()
            if len(self._members) < self._members_max:
                member = self._members[token] = Member(token, name)
        elif member.name == token != name:
            member.name = name  # known by its token until now
        return member

    def _make_room(self) -> None:
        for member in [each for each in self if each.record is None and self._expendable(each)]:
            del self._members[member.token]

    def _observe(self, member: Member, incarnation: int, now_ns: int) -> bool:
        """Notes an incarnation. True where it replaces an earlier one."""
        if incarnation == member.incarnation:
            return False
        restarted = member.incarnation != 0
        member.incarnation, member.summary = incarnation, None
        if incarnation > member.dead_through:
            member.heard_ns = now_ns
            _apply(member, MemberEvent.STARTED)
        else:
            _apply(member, MemberEvent.DIED)
        return restarted

    def _on_deleted(self, key: str) -> MembershipChange:
        member = self.find(key)
        if member is None:
            return MembershipChange()
        before, rerecorded = member.state, member.record is not None
        member.record = None
        _apply(member, MemberEvent.UNREGISTERED)
        return MembershipChange(member, True, before, False, rerecorded)

    def _on_dead(self, member: Member, through: int) -> MembershipChange:
        before = member.state
        member.dead_through = max(member.dead_through, through)
        if member.incarnation > through:
            return _ignored(member)
        _apply(member, MemberEvent.DIED)
        return MembershipChange(member, True, before)

    def _expire(self, member: Member, now_ns: int) -> bool:
        if member.silence_ns(now_ns) <= self.silence_ns:
            return False
        if member.state not in (MemberState.SERVING, MemberState.DRAINING):
            return False
        _apply(member, MemberEvent.SILENCE)
        if member.record is None:
            _apply(member, MemberEvent.UNREGISTERED)
        return True


def _ignored(member: Member | None) -> MembershipChange:
    return MembershipChange(member, False, member.state if member is not None else MemberState.UNKNOWN)


def _idle(member: Member) -> bool:
    return member.state in (MemberState.GONE, MemberState.UNKNOWN)


def _check_member(member: Member) -> None:
    assert member.token == subject_token(member.name)
    assert member.summary is None or member.summary.incarnation == member.incarnation
    assert (member.state is MemberState.UNKNOWN) <= (member.summary is None)
    ended = 0 < member.incarnation <= member.dead_through
    assert not ended or member.state in (MemberState.DEAD, MemberState.GONE), member


def _apply(member: Member, event: MemberEvent) -> None:
    """The only place that assigns a member's state."""
    member.state = next_state(member.state, event)
