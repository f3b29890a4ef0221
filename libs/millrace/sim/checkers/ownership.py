"""Checker of ownership: at most one instance owns a sequence in each epoch, and only the owner sends its tokens."""

from __future__ import annotations

from millrace.actor.effects import Effect, Publish, Reply
from millrace.contracts.ingress import TokensGenerated
from millrace.contracts.message import Message
from millrace.contracts.worker import SequenceAccepted
from millrace.sim.checkers import Checker
from millrace.sim.process import SimProcess


class SingleOwnership(Checker):
    """An instance becomes an owner by saying SequenceAccepted.

    A restarted instance may be asked again in the same epoch (a repeated submission); the incarnation before is dead
    then, so owners are distinguished by name.
    """

    def __init__(self) -> None:
        self.owners: dict[tuple[str, int], str] = {}

    def on_handled(self, process: SimProcess, message: Message, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Reply) and isinstance(effect.body, SequenceAccepted):
                self._accepted(process.name, effect.body.sequence, effect.body.epoch)
            elif isinstance(effect, Publish) and isinstance(effect.body, TokensGenerated):
                for chunk in effect.body.chunks:
                    self._sent(process.name, chunk.sequence, chunk.epoch)

    def _accepted(self, name: str, sequence: str, epoch: int) -> None:
        owner = self.owners.setdefault((sequence, epoch), name)
        assert owner == name, f"{sequence} in epoch {epoch} is accepted by {name} and by {owner}"

    def _sent(self, name: str, sequence: str, epoch: int) -> None:
        owner = self.owners.get((sequence, epoch))
        assert owner == name, f"{name} sends tokens of {sequence} in epoch {epoch}, whose owner is {owner}"
