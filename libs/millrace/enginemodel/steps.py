"""Steps of an engine that are under way, those that are done, and what a snapshot says of each sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from millrace.contracts.status import BatchComposition, EngineTotals, SequenceStatus
from millrace.enginemodel.batch import Batch
from millrace.enginemodel.stream import ModelledSequence


@dataclass(slots=True, eq=False)
class Step:
    """A step under way."""

    batch: Batch
    composition: BatchComposition
    ends_ns: int
    duration_ns: int


class StepTotals:
    """The last step and sums over all steps.

    Attributes:
        last: Composition of the last step.
        last_ns: Its duration; 0 before the first.
    """

    __slots__ = ("_busy_ns", "_context_tokens", "_decodes", "_prefill_tokens", "_steps", "last", "last_ns")

    def __init__(self) -> None:
        self.last = BatchComposition()
        self.last_ns = 0
        self._steps = self._busy_ns = self._decodes = self._prefill_tokens = self._context_tokens = 0

    def add(self, batch: BatchComposition, duration_ns: int) -> None:
        """Count one step."""
        self.last, self.last_ns = batch, duration_ns
        self._steps += 1
        self._busy_ns += duration_ns
        self._decodes += batch.decodes
        self._prefill_tokens += batch.prefill_tokens
        self._context_tokens += batch.context_tokens

    def add_run(
        self, first: BatchComposition, steps: int, duration_ns: int, *, last: tuple[BatchComposition, int]
    ) -> None:
        """Count a run of decode steps, each with one token of context more per sequence than the one before."""
        self.last, self.last_ns = last
        self._steps += steps
        self._busy_ns += duration_ns
        self._decodes += steps * first.decodes
        self._context_tokens += steps * first.context_tokens + first.decodes * (steps * (steps - 1) // 2)

    def totals(self) -> EngineTotals:
        return EngineTotals(self._steps, self._busy_ns, self._decodes, self._prefill_tokens, self._context_tokens)


def statuses(sequences: Iterable[object]) -> list[SequenceStatus]:
    """Return the status of each sequence for a snapshot.

    Arguments are positional and there is no helper call, as most of a snapshot's time is spent here.
    """
    known: Iterable[ModelledSequence] = sequences  # type: ignore[assignment]
    return [
        SequenceStatus(
            sequence.sequence,
            sequence.state,  # type: ignore[arg-type]
            sequence.prompt_tokens,
            # With async scheduling the step under way is counted in already: its tokens are not there yet.
            sequence.computed if sequence.computed < sequence.total else sequence.total,
            sequence.total - sequence.prompt_tokens,
            sequence.max_tokens,
            len(sequence.blocks) + len(sequence.beside),
            sequence.arrival_ns,
            sequence.expected_output_tokens,
        )
        for sequence in known
    ]
