"""Bench that tests of migrations at ingress share, with the messages of a migration."""

from typing import Any

from millrace.actor.effects import Reply, Request
from millrace.contracts.ingress import TokenChunk, TokensResent
from millrace.contracts.leases import KvRefused
from millrace.contracts.message import ErrorReply
from millrace.contracts.migration import AllotEpoch, EpochAllotted, SequenceMoved
from millrace.contracts.worker import CancelSequence, ResendTokens, SubmitSequence

from services.ingress.sequence import OpenSequence
from tests.unit.ingress_core import Bench, instance_of


class MoveBench(Bench):
    """Three instances; ``source`` runs call ``r``, ``target`` and ``third`` are the others."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(instances=3)
        self.source = self.run_call(**fields)
        self.target, self.third = sorted(set(self.incarnations) - {self.source})

    @property
    def sequence(self) -> OpenSequence:
        return self.actor.state.sequences["r.0"]

    @property
    def owner(self) -> tuple[str, int]:
        """Owner of the sequence, and its epoch; an empty name for nobody."""
        instance = self.sequence.instance
        return ("" if instance is None else instance.name, self.sequence.epoch)

    def ask(self, migration: str = "m", **changes: Any) -> EpochAllotted | KvRefused:
        """A source's migrator asks for an epoch."""
        fields = {"sequence": "r.0", "epoch": 0, "source": self.source, "target": self.target} | changes
        asked = AllotEpoch(migration=migration, **{"incarnation": self.incarnations.get(fields["target"], 1)} | fields)
        (reply,) = [e for e in self.send(asked, reply_to="_INBOX.1") if isinstance(e, Reply)]
        assert reply.to == "_INBOX.1"
        assert isinstance(reply.body, EpochAllotted | KvRefused)
        return reply.body

    def allot(self, migration: str = "m", **changes: Any) -> int:
        """The epoch that is allotted."""
        answer = self.ask(migration, **changes)
        assert isinstance(answer, EpochAllotted), answer
        return answer.epoch

    def moved(self, first_index: int, **changes: Any) -> None:
        """A worker's word that it has the sequence."""
        fields = {"migration": "m", "sequence": "r.0", "epoch": 1, "instance": self.target} | changes
        incarnation = self.incarnations[fields["instance"]]
        self.send(SequenceMoved(first_index=first_index, incarnation=incarnation, **fields))

    def cancels(self) -> list[tuple[str, int]]:
        """Return the instances told to drop the sequence, each with the epoch up to which it must."""
        return [
            (e.subject.split(".")[-2], e.body.epoch)
            for e in self.effects
            if isinstance(getattr(e, "body", None), CancelSequence)
        ]

    def question(self) -> tuple[str, ResendTokens]:
        """The newest ResendTokens, and whom it asks."""
        request = self.asked(ResendTokens)[-1]
        assert isinstance(request.body, ResendTokens)
        return instance_of(request), request.body

    def tell(self, chunk: TokenChunk | None) -> None:
        """Answers the newest ResendTokens: with these tokens, or that nothing is known."""
        request: Request = self.asked(ResendTokens)[-1]
        assert isinstance(request.body, ResendTokens)
        self.reply(request, ErrorReply(reason="forgotten") if chunk is None else TokensResent(chunk=chunk))

    def placed(self) -> list[tuple[str, int]]:
        """Every submission so far: instance and epoch."""
        return [
            (instance_of(request), request.body.epoch)
            for request in self.submissions()
            if isinstance(request.body, SubmitSequence)
        ]

    def outcomes(self) -> dict[str, int]:
        """Of migrations."""
        return {outcome: count for (outcome,), count in self.metrics.migrations.counts.items()}
