"""Instances and stages as ingress sees them, and the views that dispatch policies see.

Each instance has one frozen InstanceView that is replaced when its summary comes or when this ingress places or ends
something there. Each stage keeps a list of its usable views, patched in place and handed out as a tuple: a decision
over 64 instances copies 64 references and nothing else.

**In flight.** A summary is up to 250 ms old, and one step behind the engine's queue. What this ingress placed is
therefore counted as ``in_flight_*`` from the placement until the second summary after its acceptance (the first may
have been written before the engine saw it), or until it ends. Counting it twice for one period spreads load; not
counting it would send a whole burst to the instance that was idle a moment ago.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from millrace.contracts.observers import CandidateScore
from millrace.contracts.plan import Stage
from millrace.contracts.status import InstanceSummary
from millrace.membership.member import Member, MemberState
from millrace.policies.dispatch.view import InstanceView

#: Fresh summaries that must come after an acceptance until it no longer counts as in flight.
IN_FLIGHT_SUMMARIES = 2
_NOT_ACCEPTED = -1
#: A step under way is suspect from the larger of these on: so long, and so many times the longest step of the last
#: minute. Its engine gets no new sequence.
STEP_NS, STEP_FACTOR = 5_000_000_000, 8


def sign_of_hang(summary: InstanceSummary, silent_ns: int) -> str:
    """Sign of a hang in a summary; empty for none.

    Args:
        silent_ns: Age of the engine process's last sign of life from which on it counts as hung (``hang_s``).
    """
    if summary.engine_silent_ns >= silent_ns:
        return "engine hangs"
    long_ns = max(STEP_NS, STEP_FACTOR * summary.step_longest_ns)
    return "engine step takes too long" if summary.step_age_ns >= long_ns else ""


@dataclass(slots=True, eq=False)
class KnownInstance:
    """One instance: its member, and what this ingress placed there."""

    member: Member
    name: str = field(init=False)
    hang: str = ""  # sign of a hang in its latest summary
    usable: bool = False
    used: bool = False  # something was placed here once
    placements: int = 0  # sequences placed here so far
    view: InstanceView = field(init=False)
    stages: list[StageCandidates] = field(default_factory=list)
    _summaries: int = 0
    #: Sequence -> tokens, and the number of the summary at which it leaves.
    _in_flight: dict[str, list[int]] = field(default_factory=dict)
    _in_flight_tokens: int = 0

    def __post_init__(self) -> None:
        self.name = self.member.name
        self.view = InstanceView(name=self.name)

    @property
    def dead(self) -> bool:
        """Whether nothing of it is to be expected now: never heard, silent, or ended."""
        return self.member.state not in (MemberState.SERVING, MemberState.DRAINING)

    def why_not(self) -> str:
        """Reason for giving it no new work; empty where it takes some."""
        if self.member.incarnation == 0:
            return "never heard of"
        if self.dead:
            return "silent or dead"
        return self.hang if self.member.serving else "draining"

    def place(self, sequence: str, tokens: int) -> None:
        """Counts a sequence as in flight."""
        self.remove(sequence, refresh=False)
        self.used = True
        self.placements += 1
        self._in_flight[sequence] = [tokens, _NOT_ACCEPTED]
        self._in_flight_tokens += tokens
        self.refresh()

    def accept(self, sequence: str) -> None:
        """The instance has it: later summaries will count it."""
        entry = self._in_flight.get(sequence)
        if entry is not None:
            entry[1] = self._summaries + IN_FLIGHT_SUMMARIES

    def remove(self, sequence: str, *, refresh: bool = True) -> None:
        entry = self._in_flight.pop(sequence, None)
        if entry is not None:
            self._in_flight_tokens -= entry[0]
            if refresh:
                self.refresh()

    def restart(self) -> None:
        """A new process: what the earlier one had is gone."""
        self.hang = ""
        self._summaries = 0
        self._in_flight.clear()
        self._in_flight_tokens = 0

    def silent_ns(self, now_ns: int) -> int:
        """Age of its engine process's last sign of life; 0 while it is alive."""
        summary = self.member.summary
        if summary is None or not summary.engine_silent_ns:
            return 0
        return summary.engine_silent_ns + self.member.silence_ns(now_ns)

    def take_summary(self, summary: InstanceSummary, hang_ns: int) -> None:
        """A fresh summary: what it covers is no longer in flight."""
        self.hang = sign_of_hang(summary, hang_ns)
        self._summaries += 1
        if self._in_flight:
            number = self._summaries
            for sequence in [s for s, (_, due) in self._in_flight.items() if 0 <= due <= number]:
                self._in_flight_tokens -= self._in_flight.pop(sequence)[0]
        self.refresh()

    def refresh(self) -> None:
        """Rebuild the view and patch it into the stages' lists."""
        s, record = self.member.summary, self.member.record
        flights = len(self._in_flight)
        if s is None:
            self.view = InstanceView(
                name=self.name, in_flight_sequences=flights, in_flight_tokens=self._in_flight_tokens
            )
        else:
            self.view = InstanceView(
                name=self.name,
                known=True,
                running=s.running,
                waiting=s.waiting,
                running_tokens=s.running_tokens,
                waiting_prefill_tokens=s.waiting_prefill_tokens,
                used_tokens=(s.blocks_total - s.blocks_free) * s.block_size,
                total_tokens=s.blocks_total * s.block_size,
                in_flight_sequences=flights,
                in_flight_tokens=self._in_flight_tokens,
                sequences_max=record.max_sequences if record is not None else 0,
            )
        for stage in self.stages:
            stage.patch(self)

    def check_invariants(self) -> None:
        assert self._in_flight_tokens == sum(tokens for tokens, _ in self._in_flight.values())
        assert self.usable == (not self.why_not())


class StageCandidates:
    """The usable views of one stage, in order of name: of those that take new requests, or of those that only decode.

    Attributes:
        decodes: These only decode: others are asked first, for new requests and for continuations, which both prefill.
    """

    __slots__ = ("_positions", "_tuple", "_views", "decodes", "instances", "length_max", "length_min", "name")

    def __init__(self, stage: Stage, instances: list[KnownInstance], *, decodes: bool = False) -> None:
        self.name = stage.name
        self.decodes = decodes
        self.length_min = stage.length_min
        self.length_max = stage.length_max
        self.instances = instances
        self._views: list[InstanceView] = []
        self._positions: dict[str, int] = {}
        self._tuple: tuple[InstanceView, ...] | None = None
        self.rebuild()

    def rebuild(self) -> None:
        """Someone became usable, or is no longer."""
        usable = [i for i in self.instances if i.usable]
        self._views = [i.view for i in usable]
        self._positions = {i.name: position for position, i in enumerate(usable)}
        self._tuple = None

    def patch(self, instance: KnownInstance) -> None:
        """One instance has a new view."""
        position = self._positions.get(instance.name)
        if position is not None:
            self._views[position] = instance.view
            self._tuple = None

    def candidates(self) -> tuple[InstanceView, ...]:
        if self._tuple is None:
            self._tuple = tuple(self._views)
        return self._tuple

    def check_invariants(self) -> None:
        assert self.candidates() == tuple(i.view for i in self.instances if i.usable)

    def filtered(self) -> Iterator[CandidateScore]:
        """Those that are not usable, with the reason."""
        return (CandidateScore(i.name, 0.0, i.why_not()) for i in self.instances if not i.usable)
