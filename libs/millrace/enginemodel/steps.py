"""Steps of a modelled engine that are under way, the last one, and what a snapshot says of each sequence."""

from __future__ import annotations

from collections.abc import Iterable

from millrace.contracts.status import BatchComposition, SequenceStatus
from millrace.enginemodel.batch import Batch
from millrace.enginemodel.stream import ModelledSequence


class Step:
    """A step under way."""

    __slots__ = ("batch", "composition", "duration_ns", "ends_ns")

    def __init__(self, batch: Batch, composition: BatchComposition, ends_ns: int, duration_ns: int) -> None:
        self.batch = batch
        self.composition = composition
        self.ends_ns = ends_ns
        self.duration_ns = duration_ns


class LastStep:
    """What a snapshot says of the step before it."""

    __slots__ = ("composition", "duration_ns")

    def __init__(self, composition: BatchComposition | None = None, duration_ns: int = 0) -> None:
        self.composition = composition or BatchComposition()
        self.duration_ns = duration_ns


def statuses(sequences: Iterable[object]) -> list[SequenceStatus]:
    """What a snapshot says of each: positional and without a call, as most of a snapshot's time is spent here."""
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
            len(sequence.blocks),
            sequence.arrival_ns,
            sequence.expected_output_tokens,
        )
        for sequence in known
    ]
