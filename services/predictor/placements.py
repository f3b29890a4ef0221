"""Placements that no snapshot shows yet, by sequence: each is at one instance at most."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from services.predictor.state import Instance, PlacedSequence

#: A placement that no snapshot showed for so long is forgotten: a submission that is lost is known within 1.5 s.
PLACEMENT_NS_MAX = 5_000_000_000

#: Placements per instance: more than its queue takes.
PLACEMENTS_MAX = 2_048


class Placements:
    """Index over the placements of all instances."""

    def __init__(self, count: Callable[[str], None]) -> None:
        self._count = count
        self._instance_of: dict[str, Instance] = {}

    def add(self, instance: Instance, sequence: str, placement: PlacedSequence) -> None:
        instance.place(sequence, placement)
        self._instance_of[sequence] = instance

    def end(self, sequence: str, how: str) -> None:
        """A sequence went elsewhere, ended, or was given up."""
        instance = self._instance_of.pop(sequence, None)
        if instance is not None and sequence in instance.placements:
            instance.remove(sequence)
            self._count(how)

    def drop(self, instance: Instance) -> None:
        """Everything on its way to one instance is lost."""
        for sequence in instance.placements:
            self._instance_of.pop(sequence, None)
        instance.placements.clear()

    def expire(self, now_ns: int) -> None:
        """Let go of placements that were shown since, or that nobody will show any more."""
        for sequence, instance in list(self._instance_of.items()):
            placement = instance.placements.get(sequence)
            if placement is None:
                del self._instance_of[sequence]
            elif now_ns - placement.at_ns > PLACEMENT_NS_MAX:
                self.end(sequence, "expired")

    def check(self, instances: Iterable[Instance]) -> None:
        """Raise AssertionError where bounds are passed or a sequence is on its way to two instances."""
        for instance in instances:
            assert len(instance.placements) <= PLACEMENTS_MAX
            for sequence in instance.placements:
                assert self._instance_of.get(sequence) is instance, f"{sequence} is on its way to two instances"
