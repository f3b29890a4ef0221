"""Backoff for moves that no target took: each retry comes later, until there is room. Pure.

    a sequence   no target took it            it rests, twice as long each time, REST_NS_MAX at most
    an instance  no target took one of its    it pauses, twice as long each time, PAUSE_NS_MAX at most
                                              (SLOT_PAUSE_NS_MAX where the target only lacked a slot), and then asks for
                                              one at a time
    both         a sequence moved             the pause ends, and one more may be asked for at a time
                 room has grown enough        rest and pause end at once

Room has grown enough when the blocks of the largest target exceed the fewest seen since the refusal by at least as many
as the sequence needs. The room that led to a refusal does not lead to a second one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from random import Random

from millrace.contracts.kv import KvRefusal

_MS = 1_000_000

#: A snapshot may still show what has just moved: it is looked at again after this time.
SETTLE_NS = 500 * _MS

#: A sequence's first rest. Room comes when others end, at most a few each second and instance.
REST_NS = 250 * _MS

#: Its longest: a sequence of some hundred tokens lasts that long, and then need not move any more.
REST_NS_MAX = 4_000 * _MS

#: An instance's first pause: about as long as one handoff takes a slot of its target.
PAUSE_NS = 25 * _MS

#: Its longest: so late is it noticed that room has come where no summary shows it.
PAUSE_NS_MAX = 1_000 * _MS

#: And where slots were lacking: they are free again soon, and no summary tells.
SLOT_PAUSE_NS_MAX = 200 * _MS

#: Each time is drawn from its last quarter, so that instances that were refused together do not return together.
JITTER = 0.25

#: RefusalEpisode is over when nothing was refused for so long.
QUIET_NS = 10_000 * _MS

#: Nobody took it: each of these says something of targets, none of the sequence.
NOBODY = frozenset(
    {
        KvRefusal.NO_TARGET,
        KvRefusal.NO_BLOCKS,
        KvRefusal.TOO_MANY,
        KvRefusal.TARGET_REFUSED,
        KvRefusal.INCOMPATIBLE,
        KvRefusal.UNABLE,
        KvRefusal.UNANSWERED,
    }
)

#: Of those, what more idle blocks may change.
ROOM = frozenset({KvRefusal.NO_TARGET, KvRefusal.NO_BLOCKS, KvRefusal.TARGET_REFUSED})


@dataclass(frozen=True)
class MoveRest:
    """A sequence, or a whole instance, is left alone until a time.

    Attributes:
        moved: Because it has just left.
        refusals: How often in a row it was refused.
        need: Blocks by which room must grow to end it early; 0 where none would.
        room: The least that was heard since.
    """

    until_ns: int
    moved: bool = False
    refusals: int = 0
    need: int = 0
    room: int = 0

    def after(self, room: int, now_ns: int) -> MoveRest:
        """As it is with the room that is heard now."""
        if now_ns < self.until_ns and self.need and room >= self.room + self.need:
            return replace(self, until_ns=now_ns, need=0)
        return replace(self, room=min(self.room, room))


@dataclass(frozen=True)
class RefusedMove:
    """A handoff that did not happen: why, how many blocks it needs, how many the largest target had."""

    sequence: str
    reason: KvRefusal
    need: int
    room: int


@dataclass
class RefusalEpisode:
    """Refusals since the first one; told once when it begins and once when it is over."""

    since_ns: int
    last_ns: int
    refused: int = 1


@dataclass
class MoveBackoff:
    """Of one instance.

    Attributes:
        rests: By sequence.
        pause: Of the instance; None while nothing was refused since the last one that moved.
        window: Handoffs at a time.
        trouble: None while all is well.
    """

    window: int = 1_000
    rests: dict[str, MoveRest] = field(default_factory=dict)
    pause: MoveRest | None = None
    trouble: RefusalEpisode | None = None

    def free(self, out_max: int, now_ns: int) -> int:
        """Return the number of handoffs that may be under way now."""
        if self.pause is not None and now_ns < self.pause.until_ns:
            return 0
        return min(self.window, out_max)

    def is_resting(self, sequence: str, now_ns: int) -> bool:
        """Whether it is left alone now."""
        rest = self.rests.get(sequence)
        return rest is not None and now_ns < rest.until_ns

    def all_resting(self, now_ns: int) -> set[str]:
        """All that are left alone now."""
        return {sequence for sequence, rest in self.rests.items() if now_ns < rest.until_ns}

    def has_moved(self, sequence: str, now_ns: int) -> bool:
        """Whether a snapshot may show it though it has left."""
        rest = self.rests.get(sequence)
        return rest is not None and rest.moved and now_ns < rest.until_ns

    def resting(self, now_ns: int) -> int:
        """Sequences that nobody took and that are, or will be, tried again."""
        return sum(not rest.moved and (rest.refusals > 0 or now_ns < rest.until_ns) for rest in self.rests.values())

    def moved(self, sequence: str, now_ns: int) -> None:
        """It has left; where one found room others may."""
        self.rests[sequence] = MoveRest(now_ns + SETTLE_NS, moved=True)
        self.pause = None
        self.window += 1

    def leave(self, sequence: str, now_ns: int) -> None:
        """It did not move, for a reason that says nothing of the next time."""
        self.rests[sequence] = MoveRest(now_ns + REST_NS)

    def refused(self, body: RefusedMove, rng: Random, now_ns: int) -> bool:
        """Nobody took it. Returns whether the instance pauses because of it.

        Those that were asked together are refused together: that is one refusal of the instance.
        """
        need = body.need if body.reason in ROOM else 0
        before = self.rests.get(body.sequence)
        count = before.refusals + 1 if before is not None else 1
        span_ns = _span(REST_NS, count, REST_NS_MAX, rng)
        self.rests[body.sequence] = MoveRest(now_ns + span_ns, refusals=count, need=need, room=body.room)
        pauses = self.pause is None or now_ns >= self.pause.until_ns
        if pauses:
            count = self.pause.refusals + 1 if self.pause is not None else 1
            longest_ns = SLOT_PAUSE_NS_MAX if body.reason is KvRefusal.TOO_MANY else PAUSE_NS_MAX
            until_ns = now_ns + _span(PAUSE_NS, count, longest_ns, rng)
            self.pause = MoveRest(until_ns, refusals=count, need=need, room=body.room)
            self.window = 1
        return pauses

    def note(self, now_ns: int) -> bool:
        """Counts a refusal; returns whether trouble has begun with it."""
        if self.trouble is None:
            self.trouble = RefusalEpisode(now_ns, now_ns)
            return True
        self.trouble.last_ns = now_ns
        self.trouble.refused += 1
        return False

    def over(self, now_ns: int) -> RefusalEpisode | None:
        """The trouble that has just been over for long enough."""
        trouble = self.trouble
        if trouble is None or now_ns - trouble.last_ns < QUIET_NS:
            return None
        self.trouble = None
        return trouble

    def look(self, present: Collection[str], room: int, now_ns: int) -> bool:
        """Sequences that are there now, and the room of the largest target. Returns whether that ended a pause."""
        self.rests = {
            sequence: rest.after(room, now_ns)
            for sequence, rest in self.rests.items()
            if now_ns < rest.until_ns or (rest.refusals and sequence in present)
        }
        if self.pause is None or now_ns >= self.pause.until_ns:
            return False
        self.pause = self.pause.after(room, now_ns)
        return now_ns >= self.pause.until_ns

    def forget(self) -> None:
        """Ends the pause, and the rest of every sequence that has not moved: they must leave now."""
        self.rests = {sequence: rest for sequence, rest in self.rests.items() if rest.moved}
        self.pause = None


def _span(first_ns: int, count: int, longest_ns: int, rng: Random) -> int:
    """Doubled with each refusal."""
    whole_ns = min(longest_ns, first_ns << min(count - 1, 30))
    return int(whole_ns * (1 - JITTER * rng.random()))
