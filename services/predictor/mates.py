"""Engines of one host as each other's neighbours: how many compute, and whom a placement delays.

What an instance sees of its host is the host's sums without its own part of them. So a snapshot and a question cost
the same beside one neighbour as beside sixty.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import exp2

from services.predictor.neighbours import NeighbourEffect

#: Time after which half of what a neighbour did is forgotten; and after which one that tells nothing counts as idle.
LATELY_NS, SILENCE_NS = 700_000_000, 2_000_000_000

#: An engine that computes says so about every 20 ms; one that went idle may take 200 ms to report it.
WORD_NS = 40_000_000

#: Parts of shares are told relative to a time that is moved after so long, before they get too large for a float.
REBASE_NS = 40 * LATELY_NS


class Mate:
    """An instance as its neighbours see it.

    Attributes:
        effect: How each neighbour slows it.
        sequences: That it has, in its batch or waiting for it: all of them get ready later where it is slowed.
        computes: Whether it computed at the last time that its host was looked at.
        until_ns: When it ceases to, if it tells nothing more.
        part: Its share of the last second or so for which it computed is ``computes + part * host.kept``.
        burden: Sequences times the share of time by which a neighbour slows them; 0 where it does not compute.
        end_ns: The end of its work that its host waits for; 0 for none.
    """

    __slots__ = ("_host", "burden", "computes", "effect", "end_ns", "number", "part", "sequences", "until_ns")

    def __init__(self, effect: NeighbourEffect | None = None, host: HostLoad | None = None) -> None:
        self.effect = effect if effect is not None else NeighbourEffect()
        self.sequences = self.until_ns = self.end_ns = 0
        self.computes = False
        self.part = self.burden = 0.0
        self._host = host if host is not None else HostLoad()
        self.number = self._host.join(self)

    @property
    def alone(self) -> bool:
        """Whether it has no neighbours."""
        return len(self._host) == 1

    def note(self, now_ns: int, *, sequences: int, left_ns: int = SILENCE_NS) -> None:
        """Note the engine's work from now on.

        ``left_ns``: time for which it has work, if nothing new comes and it reports nothing. The report that it is done
        comes late, and steps of others in between were not slowed.
        """
        host = self._host
        now_ns = host.advance(now_ns)
        share = self.computes + self.part * host.kept
        host.take(self)
        self.sequences, self.computes = sequences, sequences > 0
        self.until_ns = now_ns + min(SILENCE_NS, max(WORD_NS, left_ns)) if sequences else now_ns
        self.part = (share - self.computes) / host.kept
        self.burden = sequences * (self.effect.factor(1) - 1)
        host.put(self)

    def cease(self) -> None:
        """Note that it computed until ``until_ns``, and no longer."""
        host = self._host
        host.take(self)
        self.part += 1 / host.kept_at(self.until_ns)  # its share is the same then, and falls from there
        self.computes, self.burden = False, 0.0
        host.put(self)

    def leave(self) -> None:
        """It is on no host any more, and has no neighbours."""
        self._host.leave(self)
        self._host = HostLoad()
        self.computes, self.part, self.burden, self.end_ns = False, 0.0, 0.0, 0
        self.number = self._host.join(self)

    def neighbours_now(self, now_ns: int) -> int:
        """Number of neighbours that compute just now."""
        self._host.advance(now_ns)
        return self._host.busy - self.computes

    def neighbours_lately(self, now_ns: int) -> float:
        """Mean number of neighbours that computed lately; it is expected to stay much the same."""
        host = self._host
        if len(host) == 1:
            return 0.0
        host.advance(now_ns)
        return max(0.0, host.busy - self.computes + (host.part - self.part) * host.kept)

    def delay_ns(self, longer_ns: int, now_ns: int) -> int:
        """Total delay of its neighbours' sequences if it computes for ``longer_ns`` longer, ns."""
        host = self._host
        host.advance(now_ns)
        if host.busy == self.computes:
            return 0
        return max(0, round(longer_ns * (host.burden - self.burden)))


class HostLoad:
    """Sums over the engines of one host.

    Attributes:
        busy: Engines that compute.
        part, burden: Sums of theirs.
        kept: Share of the time that ``part`` is relative to that still counts.
    """

    def __init__(self) -> None:
        self.busy = 0
        self.part = self.burden = 0.0
        self.kept = 1.0
        self._now_ns = self._base_ns = 0
        self._mates: dict[int, Mate] = {}
        self._joined = 0
        self._ends: list[tuple[int, int]] = []  # a heap: when engines cease to compute, their numbers

    def __len__(self) -> int:
        return len(self._mates)

    def join(self, mate: Mate) -> int:
        """Number of one more engine, which is idle."""
        self._joined += 1
        self._mates[self._joined] = mate
        return self._joined

    def leave(self, mate: Mate) -> None:
        """Drop an engine."""
        self.take(mate)
        del self._mates[mate.number]

    def take(self, mate: Mate) -> None:
        """Take an engine out of the sums."""
        self.busy -= mate.computes
        self.part -= mate.part
        self.burden -= mate.burden

    def put(self, mate: Mate) -> None:
        """Put it into them."""
        self.busy += mate.computes
        self.part += mate.part
        self.burden += mate.burden
        if mate.computes and not 0 < mate.end_ns <= mate.until_ns:
            mate.end_ns = mate.until_ns
            heappush(self._ends, (mate.end_ns, mate.number))

    def advance(self, now_ns: int) -> int:
        """Go on to a time, which does not go back; returns it."""
        if now_ns <= self._now_ns:
            return self._now_ns
        self._now_ns = now_ns
        while self._ends and self._ends[0][0] <= now_ns:
            self._end(*heappop(self._ends))
        if now_ns - self._base_ns > REBASE_NS:
            self._rebase(now_ns)
        self.kept = self.kept_at(now_ns)
        return now_ns

    def kept_at(self, at_ns: int) -> float:
        """Share of the time that parts are relative to that still counts then."""
        return exp2((self._base_ns - at_ns) / LATELY_NS)

    def _end(self, end_ns: int, number: int) -> None:
        mate = self._mates.get(number)
        if mate is None or mate.end_ns != end_ns:
            return  # it left, or was told to end sooner
        mate.end_ns = 0
        if not mate.computes:
            return
        if mate.until_ns <= self._now_ns:
            mate.cease()
        else:
            mate.end_ns = mate.until_ns
            heappush(self._ends, (mate.end_ns, number))

    def _rebase(self, now_ns: int) -> None:
        """Tell parts relative to now, and add up all sums anew."""
        kept = self.kept_at(now_ns)
        self._base_ns = now_ns
        for mate in self._mates.values():
            mate.part *= kept
        self.part = sum(mate.part for mate in self._mates.values())
        self.burden = sum(mate.burden for mate in self._mates.values())


class Hosts:
    """Neighbours of each instance, by host. An instance that names no host has no neighbours."""

    def __init__(self) -> None:
        self._hosts: dict[str, HostLoad] = {}
        self._known: dict[str, tuple[str, Mate]] = {}

    def join(self, instance: str, host: str, effect: NeighbourEffect) -> Mate:
        """Puts an instance on its host, and away from where it was."""
        self.leave(instance)
        if not host:
            return Mate(effect)
        mate = Mate(effect, self._hosts.setdefault(host, HostLoad()))
        self._known[instance] = (host, mate)
        return mate

    def leave(self, instance: str) -> None:
        """It is gone; nobody is slowed by it any more."""
        host, mate = self._known.pop(instance, ("", None))
        if mate is None:
            return
        mate.leave()
        if not len(self._hosts[host]):
            del self._hosts[host]
