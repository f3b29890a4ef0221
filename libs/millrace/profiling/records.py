"""Interface between a profile and an engine: rounds of load, and the records of each step and sequence."""

from __future__ import annotations

from typing import Protocol

import msgspec

from millrace.contracts.status import BatchComposition
from millrace.enginemodel.parameters import EngineParameters


class PlannedSequence(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence of a round. Lengths in tokens.

    Attributes:
        at_step: Steps of the round before it is added.
    """

    prompt_tokens: int
    output_tokens: int
    at_step: int = 0


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One load, run until all of its sequences are done.

    Attributes:
        name: Unique within a profile; also the seed of its prompts.
        in_flight: A closed loop: so many sequences are kept in the engine, each one that ends is replaced by the next.
            0 for an open one, in which each is added at its step.
    """

    name: str
    sequences: tuple[PlannedSequence, ...]
    in_flight: int = 0

    def due(self, index: int, *, steps: int, running: int) -> bool:
        """Whether a sequence is added now.

        Args:
            index: Of the next sequence.
            running: Sequences in the engine. An idle engine always gets the next one.
        """
        if self.in_flight:
            return running < self.in_flight
        return running == 0 or self.sequences[index].at_step <= steps


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One step.

    Attributes:
        sequences: Indices within the round of those in the batch.
        wall_ns: From the beginning of its scheduling to the end of its outputs' processing.
        cpu_ns: Processor time of the engine's process in between.
    """

    batch: BatchComposition
    sequences: tuple[int, ...]
    wall_ns: int
    cpu_ns: int


class RoundRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A round as it ran.

    Attributes:
        added: Steps that had run when each sequence was added; empty where that is as planned.
    """

    round: Round
    steps: list[StepRecord]
    added: list[int] = []


class Profiled(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that is measured.

    Attributes:
        model: As in provenances, and so the next two.
        engine: Which engine, in which version.
        parameters: Its limits. ``blocks_total`` times ``block_size`` is what its memory holds.
        steady_clock: Whether processor time is what a step would take undisturbed: engines of one thread.
    """

    model: str
    hardware: str
    engine: str
    parameters: EngineParameters
    steady_clock: bool = False


class ProfilePort(Protocol):
    """An engine that runs rounds."""

    def profiled(self) -> Profiled:
        """Return the description of the engine."""
        ...

    def run(self, load: Round) -> RoundRecord:
        """Runs one round."""
        ...

    def close(self) -> None:
        """Ends the engine. Idempotent."""
        ...
