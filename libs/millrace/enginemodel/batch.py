"""Batch of one step: its sequences, and the number of tokens computed of each."""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.contracts.status import BatchComposition
from millrace.enginemodel.sequence import ScheduledSequence


@dataclass(slots=True, eq=False)
class Batch:
    """One scheduled step. Parallel lists, because a step is built and read far more often than it is looked at.

    Attributes:
        sequences: In scheduling order: running ones first, then the newly admitted.
        counts: Tokens computed of each.
        computed_before: Tokens that each had computed before this step.
        sampling: Those of ``sequences`` that sample a token at the end of the step.
        preempted: Put back into the queue to make room, in order.
        admitted: How many at the end of ``sequences`` came from the waiting queue.
    """

    sequences: list[ScheduledSequence] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    computed_before: list[int] = field(default_factory=list)
    sampling: list[ScheduledSequence] = field(default_factory=list)
    preempted: list[ScheduledSequence] = field(default_factory=list)
    admitted: int = 0
    decodes: int = 0
    context_tokens: int = 0
    prefill_tokens: int = 0
    prefill_context_tokens: int = 0
    half_work: int = 0  # doubled prefill work, a whole number

    def put(self, sequence: ScheduledSequence, count: int) -> None:
        """Adds ``count`` tokens of a sequence and advances what it has computed."""
        computed = sequence.computed
        self.sequences.append(sequence)
        self.counts.append(count)
        self.computed_before.append(computed)
        if count == 1 and computed >= sequence.prompt_tokens and computed + 1 >= sequence.total:
            self.decodes += 1  # is_decode, without the call
        else:
            self.prefill_tokens += count
            self.prefill_context_tokens += computed + count
            self.half_work += count * (2 * computed + count)
        computed += count
        sequence.computed = computed
        self.context_tokens += computed
        if computed >= sequence.total + sequence.placeholders:
            self.sampling.append(sequence)

    def put_decode(self, sequence: ScheduledSequence) -> bool:
        """Adds a sequence that just decodes on within its last block; returns False where it does anything else.

        This is what nearly every sequence does in nearly every step, so it is decided here by three comparisons.
        """
        before = sequence.computed
        computed = before + 1
        if computed != sequence.total or computed >= sequence.slots or before < sequence.prompt_tokens:
            return False
        sequence.computed = computed
        self.sequences.append(sequence)
        self.counts.append(1)
        self.computed_before.append(before)
        self.sampling.append(sequence)
        self.context_tokens += computed
        self.decodes += 1
        return True

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    def note_in_flight(self) -> None:
        """Async scheduling: the sampled tokens are not known yet, and the next step counts on them."""
        for sequence in self.sequences:
            sequence.in_flight += 1
        for sequence in self.sampling:
            sequence.placeholders += 1

    def composition(self, *, with_longest: bool = False) -> BatchComposition:
        """The figures that a step-time model wants. ``with_longest``: also the longest context, which costs a pass."""
        return BatchComposition(
            decodes=self.decodes,
            prefills=len(self.sequences) - self.decodes,
            prefill_tokens=self.prefill_tokens,
            context_tokens=self.context_tokens,
            prefill_work=self.half_work / 2,
            prefill_context_tokens=self.prefill_context_tokens,
            longest_context=self._longest_context() if with_longest else 0,
        )

    def _longest_context(self) -> int:
        shares = zip(self.sequences, self.counts, self.computed_before, strict=True)
        return max((before + count for s, count, before in shares if is_decode(s, count, before)), default=0)


def is_decode(sequence: ScheduledSequence, count: int, computed_before: int) -> bool:
    """Whether this share of a batch decodes."""
    return is_decode_step(count, computed_before, sequence.prompt_tokens, sequence.total)


def is_decode_step(count: int, computed_before: int, prompt_tokens: int, total: int) -> bool:
    """The rule: the one last token, past the prompt. All else is a prompt chunk, or recompute after a preemption."""
    return count == 1 and computed_before >= prompt_tokens and computed_before + 1 >= total
