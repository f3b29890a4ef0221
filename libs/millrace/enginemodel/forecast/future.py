"""One instance's future, step by step: the modelled engine's own scheduler on counts of tokens and blocks.

Nothing here is fast; it says what is right. Times are femtoseconds since the snapshot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice

import msgspec

from millrace.contracts.status import SequenceState, SequenceStatus, StatusSnapshot
from millrace.enginemodel.forecast.future_sequence import FutureScheduler, FutureSequence
from millrace.enginemodel.forecast.known import ForecastInput
from millrace.enginemodel.forecast.present import LengthRevision, cached_of
from millrace.enginemodel.forecast.question import Candidate, Placement
from millrace.enginemodel.parameters import EngineParameters, QueuePolicy
from millrace.enginemodel.step_cost import FS_PER_NS


class FutureStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step that was rolled, and the instance while it ran.

    Attributes:
        blocks: In use.
        tokens: Tokens with KV, those that the step computes included.
        running: Sequences in the running list.
        waiting: Sequences in the queue.
        preempted: Sequences preempted to form it.
    """

    begin_fs: int
    end_fs: int
    blocks: int
    tokens: int
    running: int
    waiting: int
    preempted: int


class Future:
    """Rolls one instance forward until all its sequences, and those that arrive, have ended.

    Attributes:
        clock_fs: End of the last step; the next one begins then, if there is work.
        steps: All that were rolled.
        present: Sequences of the snapshot that had not ended, by id; running ones first.
        initial: The instance at the snapshot, as a step that takes no time.
        idle: The same when nothing is there.
    """

    def __init__(self, state: ForecastInput, arrivals: Sequence[FutureSequence]) -> None:
        """Args: arrivals: in order of arrival."""
        self.clock_fs = 0
        self.steps: list[FutureStep] = []
        self._cost = state.cost
        self._ahead = state.parameters.async_scheduling
        self._arrivals = deque(arrivals)
        self._scheduler = FutureScheduler(counting(state.parameters, state.snapshot))
        self.present = _restore(self._scheduler, state.snapshot, state.lengths, state.cached)
        self.initial = self._state(0, 0, preempted=0)
        self.idle = FutureStep(begin_fs=0, end_fs=0, blocks=0, tokens=0, running=0, waiting=0, preempted=0)
        self._leaver: tuple[FutureSequence, int] | None = None
        self._comer: FutureSequence | None = None

    @property
    def blocks_total(self) -> int:
        """KV blocks, free and in use."""
        return self._scheduler.pool.blocks_total

    def remove(self, sequence: FutureSequence, at_fs: int) -> None:
        """Lets one of ``present`` go at the end of the first step that ends at ``at_fs`` or later."""
        self._leaver = sequence, at_fs

    def bring(self, sequence: FutureSequence) -> None:
        """Lets one come with its KV at its ``arrives_fs``, or later: as soon as there are blocks and a place for it.

        Its blocks are taken from the free ones, none is preempted for it, and then it is admitted before all that
        wait, as whoever comes by migration.
        """
        self._comer = sequence

    def run(self) -> None:
        """Rolls until nothing is left."""
        while self._scheduler.has_work() or self._arrivals or self._comer is not None:
            if self._has_left():
                continue
            self._join()
            self._step()

    def _has_left(self) -> bool:
        """Lets the leaver go when it is time for it."""
        if self._leaver is None or not self.steps or self.clock_fs < self._leaver[1]:
            return False
        sequence, self._leaver = self._leaver[0], None
        self._scheduler.remove(sequence)
        return True

    def _join(self) -> None:
        """Queues what came before the next step was formed: as it begins, or with async scheduling a step sooner.

        An idle engine waits for what comes; the step under way at the snapshot was formed before anything came.
        """
        formed_fs = self.clock_fs
        if not self._scheduler.has_work():
            formed_fs = self.clock_fs = max(self.clock_fs, self._next_fs())
        elif not self.steps:
            return
        elif self._ahead:
            formed_fs = self.steps[-1].begin_fs
        while self._arrivals and self._arrivals[0].arrives_fs <= formed_fs:
            sequence = self._arrivals.popleft()
            sequence.joined_fs = self.clock_fs
            self._scheduler.add(sequence)
        if self._comer is not None and self._comer.arrives_fs <= formed_fs:
            self._admit_comer(self._comer)

    def _next_fs(self) -> int:
        """Return the arrival time of the next sequence, fs."""
        coming = [sequence.arrives_fs for sequence in (*islice(self._arrivals, 1), self._comer) if sequence is not None]
        return min(coming)

    def _admit_comer(self, sequence: FutureSequence) -> None:
        scheduler, block_size = self._scheduler, self._scheduler.parameters.block_size
        blocks = -(-sequence.total // block_size)
        if scheduler.places() > 0 and blocks <= scheduler.pool.free:
            sequence.joined_fs = self.clock_fs
            sequence.computed, sequence.slots = sequence.total - 1, blocks * block_size
            sequence.blocks = scheduler.pool.take(blocks)
            scheduler.arrived.append(sequence)
            self._comer = None

    def _state(self, begin_fs: int, end_fs: int, *, preempted: int) -> FutureStep:
        scheduler = self._scheduler
        return FutureStep(
            begin_fs=begin_fs,
            end_fs=end_fs,
            blocks=scheduler.pool.blocks_total - scheduler.pool.free,
            tokens=sum(sequence.computed for sequence in (*scheduler.running, *scheduler.arrived)),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(scheduler.arrived),
            preempted=preempted,
        )

    def _step(self) -> None:
        batch = self._scheduler.schedule()
        assert batch.sequences, "an engine with work computes nothing"
        begin_fs = self.clock_fs
        self.clock_fs += self._cost.duration_fs(batch.composition(with_longest=self._cost.tail_token > 0))
        self.steps.append(self._state(begin_fs, self.clock_fs, preempted=len(batch.preempted)))
        for sequence in batch.sequences[len(batch.sequences) - batch.admitted :]:
            assert isinstance(sequence, FutureSequence)
            sequence.started_fs = begin_fs if sequence.started_fs is None else sequence.started_fs
        for sequence in batch.sampling:
            assert isinstance(sequence, FutureSequence)
            sequence.append(0)
            sequence.token_fs.append(self.clock_fs)
            if sequence.total == sequence.ends_total:
                self._scheduler.remove(sequence)


def arrivals(placements: Sequence[Placement], origin_ns: int, lengths: LengthRevision) -> list[FutureSequence]:
    """The sequences of some placements, in order of arrival."""
    found = [
        sequence
        for each in placements
        for sequence in sequences_of(each, origin_ns, final_tokens=lengths.of_placement(each.candidate))
    ]
    return sorted(found, key=lambda sequence: sequence.arrives_fs)


def sequences_of(placement: Placement, origin_ns: int, *, final_tokens: int) -> list[FutureSequence]:
    """One for each choice.

    Args:
        origin_ns: Time of the snapshot.
        final_tokens: Output length at the end of each.
    """
    candidate: Candidate = placement.candidate
    return [
        FutureSequence(
            prompt_tokens=candidate.prompt_tokens,
            output_tokens=candidate.output_tokens,
            final_tokens=final_tokens,
            arrives_fs=max(0, placement.at_ns - origin_ns) * FS_PER_NS,
            cached_tokens=candidate.cached_tokens,
        )
        for _ in range(candidate.sequences)
    ]


def in_force(parameters: EngineParameters, snapshot: StatusSnapshot) -> EngineParameters:
    """The parameters with the token budget that the snapshot tells; it is taken to stay."""
    budget = snapshot.token_budget
    if not 0 < budget < parameters.token_budget or not parameters.chunked_prefill:
        return parameters
    return msgspec.structs.replace(parameters, token_budget=budget)


def counting(parameters: EngineParameters, snapshot: StatusSnapshot) -> EngineParameters:
    """The engine as far as counts go: first come first served, no prefix index, one step at a time.

    Its blocks are the free ones and those of each sequence (shared ones count for each), and no fewer than one sequence
    of ``max_model_len`` needs, so that the future always ends.
    """
    blocks = snapshot.blocks_free + sum(status.blocks for status in (*snapshot.running, *snapshot.waiting))
    return msgspec.structs.replace(
        in_force(parameters, snapshot),
        blocks_total=max(blocks, -(-parameters.max_model_len // parameters.block_size)),
        prefix_caching=False,
        queue_policy=QueuePolicy.FCFS,
        async_scheduling=False,
    )


def _restore(
    scheduler: FutureScheduler, snapshot: StatusSnapshot, lengths: LengthRevision, cached: Mapping[str, int]
) -> dict[str, FutureSequence]:
    """Puts the snapshot's sequences into an empty scheduler. Those at their end are left out, their blocks are free."""
    running = [(status, sequence) for status in snapshot.running if (sequence := _living(status, lengths)) is not None]
    waiting = [(status, sequence) for status in snapshot.waiting if (sequence := _living(status, lengths)) is not None]
    for status, sequence in running:
        sequence.state = SequenceState.RUNNING
        _hold(scheduler, sequence, status)
        scheduler.running.append(sequence)
    for status, sequence in waiting:
        if _came_with_kv(status, sequence, scheduler.parameters.block_size):
            _hold(scheduler, sequence, status)
            scheduler.arrived.append(sequence)
        else:
            sequence.cached_tokens = cached_of(status, cached)
            scheduler.add(sequence)
    return {status.sequence: sequence for status, sequence in (*running, *waiting)}


def _came_with_kv(status: SequenceStatus, sequence: FutureSequence, block_size: int) -> bool:
    """Whether one that waits has KV, and room for all its tokens: it moved here, and was in no step yet."""
    return status.computed_tokens > 0 and status.blocks * block_size >= sequence.total


def _hold(scheduler: FutureScheduler, sequence: FutureSequence, status: SequenceStatus) -> None:
    # Where steps are scheduled ahead, the one under way counts as computed already.
    sequence.computed = min(status.computed_tokens, sequence.total - 1)
    sequence.blocks = scheduler.pool.take(status.blocks)
    sequence.slots = status.blocks * scheduler.parameters.block_size


def _living(status: SequenceStatus, lengths: LengthRevision) -> FutureSequence | None:
    final_tokens = lengths.of_sequence(status)
    if final_tokens <= status.output_tokens:
        return None
    return FutureSequence(
        prompt_tokens=status.prompt_tokens, output_tokens=status.output_tokens, final_tokens=final_tokens
    )
