"""One instance's future, step by step: the modelled engine's own scheduler on counts of tokens and blocks.

Nothing here is fast; it says what is right. Times are femtoseconds since the snapshot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from millrace.contracts.status import SequenceState, SequenceStatus, StatusSnapshot
from millrace.enginemodel.forecast.future_sequence import FutureScheduler, FutureSequence
from millrace.enginemodel.forecast.present import Lengths, cached_of
from millrace.enginemodel.forecast.question import Candidate, Placement
from millrace.enginemodel.parameters import EngineParameters, QueuePolicy
from millrace.enginemodel.stepcost import FS_PER_NS, StepCost


class FutureStep(msgspec.Struct, frozen=True):
    """A step that was rolled.

    Attributes:
        blocks: In use while it ran.
        preempted: Sequences preempted to form it.
    """

    begin_fs: int
    end_fs: int
    blocks: int
    preempted: int


class Future:
    """Rolls one instance forward until all its sequences, and those that arrive, have ended.

    Attributes:
        clock_fs: End of the last step; the next one begins then, if there is work.
        steps: All that were rolled.
        present: Sequences of the snapshot that had not ended.
    """

    def __init__(
        self,
        snapshot: StatusSnapshot,
        arrivals: Sequence[FutureSequence],
        cost: StepCost,
        *,
        parameters: EngineParameters,
        lengths: Lengths,
        cached: Mapping[str, int],
    ) -> None:
        """Args:
        arrivals: In order of arrival.
        cached: By sequence, tokens of waiting ones that are in the prefix cache.
        """
        self.clock_fs = 0
        self.steps: list[FutureStep] = []
        self._cost = cost
        self._ahead = parameters.async_scheduling
        self._arrivals = deque(arrivals)
        self._scheduler = FutureScheduler(counting(parameters, snapshot))
        self.present = _restore(self._scheduler, snapshot, lengths, cached)

    def run(self) -> None:
        """Rolls until nothing is left."""
        while self._scheduler.has_work() or self._arrivals:
            self._join()
            self._step()

    def _join(self) -> None:
        """Queues what came before the next step was formed: as it begins, or with async scheduling a step sooner.

        An idle engine waits for what comes; the step under way at the snapshot was formed before anything came.
        """
        formed_fs = self.clock_fs
        if not self._scheduler.has_work():
            formed_fs = self.clock_fs = max(self.clock_fs, self._arrivals[0].arrives_fs)
        elif not self.steps:
            return
        elif self._ahead:
            formed_fs = self.steps[-1].begin_fs
        while self._arrivals and self._arrivals[0].arrives_fs <= formed_fs:
            sequence = self._arrivals.popleft()
            sequence.joined_fs = self.clock_fs
            self._scheduler.add(sequence)

    def _step(self) -> None:
        batch = self._scheduler.schedule()
        assert batch.sequences, "an engine with work computes nothing"
        begin_fs, pool = self.clock_fs, self._scheduler.pool
        blocks, preempted = pool.blocks_total - pool.free, len(batch.preempted)
        self.clock_fs += self._cost.duration_fs(batch.composition(with_longest=self._cost.longest_token > 0))
        self.steps.append(FutureStep(begin_fs, self.clock_fs, blocks, preempted))
        for sequence in batch.sampling:
            assert isinstance(sequence, FutureSequence)
            sequence.append(0)
            sequence.token_fs.append(self.clock_fs)
            if sequence.total == sequence.ends_total:
                self._scheduler.remove(sequence)


def arrivals(placements: Sequence[Placement], origin_ns: int, lengths: Lengths) -> list[FutureSequence]:
    """The sequences of some placements, in order of arrival."""
    found = [sequence for each in placements for sequence in sequences_of(each, origin_ns, lengths)]
    return sorted(found, key=lambda sequence: sequence.arrives_fs)


def sequences_of(placement: Placement, origin_ns: int, lengths: Lengths) -> list[FutureSequence]:
    """One for each choice. ``origin_ns``: time of the snapshot."""
    candidate: Candidate = placement.candidate
    return [
        FutureSequence(
            prompt_tokens=candidate.prompt_tokens,
            output_tokens=candidate.output_tokens,
            final_tokens=lengths.of_candidate(candidate),
            arrives_fs=max(0, placement.at_ns - origin_ns) * FS_PER_NS,
            cached_tokens=candidate.cached_tokens,
        )
        for _ in range(candidate.sequences)
    ]


def counting(parameters: EngineParameters, snapshot: StatusSnapshot) -> EngineParameters:
    """The engine as far as counts go: first come first served, no prefix index, one step at a time.

    Its blocks are the free ones and those of each sequence (shared ones count for each), and no fewer than one sequence
    of ``max_model_len`` needs, so that the future always ends.
    """
    blocks = snapshot.blocks_free + sum(status.blocks for status in (*snapshot.running, *snapshot.waiting))
    return msgspec.structs.replace(
        parameters,
        blocks_total=max(blocks, -(-parameters.max_model_len // parameters.block_size)),
        prefix_caching=False,
        policy=QueuePolicy.FCFS,
        async_scheduling=False,
    )


def _restore(
    scheduler: FutureScheduler, snapshot: StatusSnapshot, lengths: Lengths, cached: Mapping[str, int]
) -> list[FutureSequence]:
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
    return [sequence for _, sequence in (*running, *waiting)]


def _came_with_kv(status: SequenceStatus, sequence: FutureSequence, block_size: int) -> bool:
    """Whether one that waits has KV, and room for all its tokens: it moved here, and was in no step yet."""
    return status.computed_tokens > 0 and status.blocks * block_size >= sequence.total


def _hold(scheduler: FutureScheduler, sequence: FutureSequence, status: SequenceStatus) -> None:
    # Where steps are scheduled ahead, the one under way counts as computed already.
    sequence.computed = min(status.computed_tokens, sequence.total - 1)
    sequence.blocks = scheduler.pool.take(status.blocks)
    sequence.slots = status.blocks * scheduler.parameters.block_size


def _living(status: SequenceStatus, lengths: Lengths) -> FutureSequence | None:
    final_tokens = lengths.of_sequence(status)
    if final_tokens <= status.output_tokens:
        return None
    return FutureSequence(
        prompt_tokens=status.prompt_tokens, output_tokens=status.output_tokens, final_tokens=final_tokens
    )
