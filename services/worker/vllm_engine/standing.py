"""Leases of an engine whose KV cannot move: a sequence stands still for everybody else, to be computed elsewhere.

The engine decodes on meanwhile and what it says is withheld: told after all where the sequence stays, dropped where it
has gone. Nothing of the engine has to know how its KV is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.actor.engine import (
    EndLeaseInEngine,
    EngineSequence,
    FreezeInEngine,
    KvCommand,
    KvDenied,
    KvLeaseTaken,
    LeaseInEngine,
    SequenceStopped,
    StepOutput,
    denied,
)
from millrace.contracts.kv import KvRefusal


@dataclass(slots=True)
class _Followed:
    """A sequence. ``withheld``: what the engine said since it stands still; None while it does not."""

    prompt_tokens: int
    tokens: list[int]
    withheld: list[StepOutput] | None = field(default=None)


class StandingSequences:
    """Follows every sequence of the engine, so that it can say the tokens of one that shall go on elsewhere."""

    def __init__(self) -> None:
        self._followed: dict[str, _Followed] = {}
        self._leased: dict[str, str] = {}

    def follow(self, sequence: EngineSequence) -> None:
        """The engine has it from now on."""
        self._followed[sequence.sequence] = _Followed(len(sequence.prompt_token_ids), [*sequence.output_token_ids])

    def forget(self, sequence: str) -> None:
        """It is gone: nothing more is said of it."""
        self._followed.pop(sequence, None)

    def take(self, output: StepOutput) -> StepOutput | None:
        """Return the output where it may be told now."""
        followed = self._followed.get(output.sequence)
        if followed is None:
            return output
        if followed.withheld is not None:
            followed.withheld.append(output)
            return None
        followed.tokens += output.token_ids
        if output.finish is not None:
            self.forget(output.sequence)
        return output

    def ask(self, command: KvCommand, now_ns: int) -> KvLeaseTaken | SequenceStopped | KvDenied:
        """Answers a lease or a freeze; nothing else can be had."""
        name = command.sequence if isinstance(command, LeaseInEngine | FreezeInEngine) else ""
        followed = self._followed.get(name)
        if not name:
            return denied(command, KvRefusal.UNABLE, "this engine moves nothing; its record says why")
        if followed is None:
            return denied(command, KvRefusal.UNKNOWN_SEQUENCE)
        if not followed.tokens:
            return denied(command, KvRefusal.NOT_RUNNING, "its prompt is not done")
        lengths = followed.prompt_tokens + len(followed.tokens) - 1  # the last token's KV is computed with the next
        if isinstance(command, LeaseInEngine):
            self._leased[command.migration] = name
            return KvLeaseTaken(
                migration=command.migration,
                sequence=name,
                from_block=command.from_block,
                blocks=[],
                prompt_tokens=followed.prompt_tokens,
                output_tokens=len(followed.tokens),
                computed_tokens=lengths,
            )
        if command.migration not in self._leased:
            return denied(command, KvRefusal.LEASE_LOST)
        followed.withheld = followed.withheld or []
        return SequenceStopped(
            migration=command.migration,
            sequence=name,
            from_block=0,
            blocks=[],
            output_token_ids=[*followed.tokens],
            computed_tokens=lengths,
            frozen_ns=now_ns,
        )

    def end(self, command: EndLeaseInEngine) -> tuple[str, list[StepOutput]]:
        """The sequence that a lease was on, empty where there is none, and what of it can be told after all."""
        name = self._leased.pop(command.migration, "")
        followed = self._followed.get(name)
        if command.moved or followed is None or followed.withheld is None:
            return name, []
        withheld, followed.withheld = followed.withheld, None
        return name, [told for output in withheld if (told := self.take(output)) is not None]
