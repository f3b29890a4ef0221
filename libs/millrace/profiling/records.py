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
            steps: Run so far.
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
        hardware: What it runs on.
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


class SequenceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that ran, with means over the steps that it was in.

    Attributes:
        latency_ns: From being added to its last token.
        normalised_latency_ns: The same per output token.
        batch_size: Sequences in the batch (n).
        prompt_tokens_sum: Of all of them (sum of I).
        prompt_tokens_squared_sum: (sum of I^2).
        context_tokens_sum: (sum of L).
    """

    prompt_tokens: int
    output_tokens: int
    latency_ns: int
    normalised_latency_ns: float
    batch_size: float
    prompt_tokens_sum: float
    prompt_tokens_squared_sum: float
    context_tokens_sum: float


def sequence_records(record: RoundRecord, *, cpu: bool = False) -> list[SequenceRecord]:
    """Return one record per sequence of a round; steps took processor time if ``cpu`` is set, else wall-clock time."""
    planned = record.round.sequences
    ends = _ends(record, cpu=cpu)
    found = []
    for index, sequence in enumerate(planned):
        steps = [number for number, step in enumerate(record.steps) if index in step.sequences]
        at_step = record.added[index] if record.added else sequence.at_step
        began = ends[at_step - 1] if at_step else 0
        latency = ends[steps[-1]] - began
        batches = [record.steps[number] for number in steps]
        prompts = [[planned[each].prompt_tokens for each in step.sequences] for step in batches]
        found.append(
            SequenceRecord(
                prompt_tokens=sequence.prompt_tokens,
                output_tokens=sequence.output_tokens,
                latency_ns=latency,
                normalised_latency_ns=latency / sequence.output_tokens,
                batch_size=_mean([len(step.sequences) for step in batches]),
                prompt_tokens_sum=_mean([sum(each) for each in prompts]),
                prompt_tokens_squared_sum=_mean([sum(tokens**2 for tokens in each) for each in prompts]),
                context_tokens_sum=_mean([step.batch.context_tokens for step in batches]),
            )
        )
    return found


def _ends(record: RoundRecord, *, cpu: bool) -> list[int]:
    """Return the end of each step, ns from the beginning of the round."""
    ends, total = [], 0
    for step in record.steps:
        total += step.cpu_ns if cpu else step.wall_ns
        ends.append(total)
    return ends


def _mean(values: list[int]) -> float:
    return sum(values) / len(values)
