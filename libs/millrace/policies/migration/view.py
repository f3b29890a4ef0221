"""Input and output of a target policy. Frozen; the owner of the state makes one per question."""

from __future__ import annotations

import msgspec

from millrace.contracts.observers import CandidateScore
from millrace.contracts.plan import InstanceRole


class TargetView(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One instance that could take a sequence.

    Attributes:
        blocks_free: KV blocks that are free, by its last summary.
        blocks_promised: Blocks of migrations of this asker that are on their way there and in no summary yet.
        same_machine: KV needs no network to get there.
        waiting: Sequences in its queue: whatever is free, they will want it.
        running: Sequences in its running batch.
        arriving: Sequences of this asker that are on their way there.
        step_ns: Mean time of its last steps; 0 where unknown.
        bytes_per_s: Measured bandwidth of transfers from the source's machine to its own; 0 before the first.
        blocks_there: First blocks of the sequence that were sent there with others.
    """

    name: str
    blocks_free: int
    blocks_total: int
    blocks_promised: int = 0
    role: InstanceRole = InstanceRole.BOTH
    same_machine: bool = False
    waiting: int = 0
    running: int = 0
    arriving: int = 0
    step_ns: int = 0
    bytes_per_s: float = 0.0
    blocks_there: int = 0

    def idle_after(self, blocks: int) -> int:
        """Blocks that would be idle with ``blocks`` more in use; negative where they do not fit."""
        return self.blocks_free - self.blocks_promised - blocks


class TargetQuestion(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Question to a target policy: the target of one sequence.

    Attributes:
        blocks: KV blocks that it needs there: its own, and some to grow.
        handoff: It comes from a prefill instance, so one that decodes comes first.
        candidates: Those that may take it, in order of name.
        filtered: Those that may not, each with a note why.
        blocks_held: KV blocks that it has.
        block_bytes: Of one.
        rest_tokens: Predicted tokens still to come; None where unknown.
    """

    sequence: str
    blocks: int
    candidates: tuple[TargetView, ...]
    handoff: bool = False
    filtered: tuple[CandidateScore, ...] = ()
    blocks_held: int = 0
    block_bytes: int = 0
    rest_tokens: int | None = None


class TargetDecision(msgspec.Struct, frozen=True, gc=False):
    """An answer.

    Attributes:
        chosen: Instance, or None where nobody has room.
        reason: One sentence with units.
        scores: Of at most SCORES_MAX candidates and those that were left out; 1 is best.
    """

    chosen: str | None
    reason: str
    scores: list[CandidateScore]
