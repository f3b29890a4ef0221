"""A whole engine as a state machine without I/O or clock: sequences in, steps that take modelled time, tokens out.

A driver calls ``begin_step`` when the engine is free, waits for the returned time, and calls ``complete_step``;
between the two it may add and cancel at any time. The live driver (services/worker/modelled.py) waits on the wall
clock, the simulator on virtual time; the engine cannot tell which.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from millrace.actor.engine import EngineSequence, EngineStepped, StepOutput
from millrace.contracts.kv import KvEndpoint
from millrace.contracts.status import BatchComposition, EngineSnapshot, SequenceState, SequenceStatus
from millrace.enginemodel.batch import Batch
from millrace.enginemodel.moves import KvMoves
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.refusals import sampling_refusal
from millrace.enginemodel.runs import DecodeRun, decodes_left
from millrace.enginemodel.scheduler import Scheduler
from millrace.enginemodel.sequence import ScheduledSequence
from millrace.enginemodel.step_cost import FS_PER_NS
from millrace.enginemodel.step_time_models import StepTimeModel
from millrace.enginemodel.steps import Step, StepTotals, statuses
from millrace.enginemodel.stream import ModelledSequence
from millrace.enginemodel.tokens import OutputLengths, Vocabulary

NO_VOCABULARY = Vocabulary()
NO_LENGTHS = OutputLengths()


class ModelledEngine:
    """One engine. Owns its sequences, its scheduler and the steps under way.

    Invariant: every sequence added and not refused gets outputs until one has a ``finish``, is cancelled, or has moved.

    Attributes:
        moves: What of its KV other engines may read, and what it reads of theirs.
        noise: What sequences are sampled with that have no seed and a temperature: another one makes other tokens.
        content_matters: Whether its tokens depend on what is in its KV blocks.
    """

    content_matters = True

    def __init__(
        self,
        parameters: EngineParameters,
        step_time: StepTimeModel,
        *,
        vocabulary: Vocabulary = NO_VOCABULARY,
        lengths: OutputLengths = NO_LENGTHS,
        tell_interval_ns: int | None = None,
        kv: KvEndpoint | None = None,
    ) -> None:
        """Builds it at rest.

        Args:
            kv: Where its KV lies, for engines that move sequences; None for one that moves nothing.
            tell_interval_ns: Least time between two outputs of a sequence, but for its first and last token (vLLM's
                ``--stream-interval``). None tells tokens with each step, and allows no runs.
        """
        self.parameters = parameters
        self.scheduler = Scheduler(parameters)
        self.cost = step_time.cost(parameters)
        self.noise = 0
        self._remainder_fs = 0  # of the last step's end, below a nanosecond
        self.moves = KvMoves(self.scheduler, self._progress, kv)
        self._vocabulary = vocabulary
        self._table = vocabulary.table()
        self._lengths = lengths
        self._sequences: dict[str, ModelledSequence] = {}
        self._under_way: deque[Step] = deque()
        self._depth = 2 if parameters.async_scheduling else 1
        self.output_tokens = 0  # sampled so far
        self._step = 0
        self._done = StepTotals()
        self._decode_run: DecodeRun | None = None
        #: Factor on the time of each step as it begins, where something around the engine slows it; None for nothing.
        self.slowed: Callable[[], float] | None = None
        #: Writes the engine's own estimate of its length into a running sequence's status; None where it makes none.
        self.estimated: Callable[[SequenceStatus], SequenceStatus] | None = None
        self._tell_interval_ns = tell_interval_ns
        self._reported_ns = 0

    @property
    def steps(self) -> int:
        """Steps completed so far."""
        return self._step

    def add(self, source: EngineSequence) -> str | None:
        """Takes a sequence. Returns None, or why it is refused."""
        if (refusal := self._refusal(source)) is not None:
            return refusal
        sequence = self._sequence(source)
        self._sequences[source.sequence] = sequence
        self.scheduler.add(sequence)
        return None

    # Moving

    def expect(self, source: EngineSequence) -> str | None:
        """Takes a sequence whose last blocks are still being read into its reservation: ``moves.arrive`` puts it before
        those that wait. Returns None, or why it is refused.
        """
        refusal = self._refusal(source)
        if refusal is None:
            self._sequences[source.sequence] = sequence = self._sequence(source)
            self.moves.expect(sequence)
        return refusal

    def end_lease(self, migration: str, *, moved: bool) -> None:
        """Ends a lease. The sequence leaves without a word where it has moved, and decodes on where it stood still."""
        gone = self.moves.leases.end(migration, moved=moved)
        if gone is not None:
            self.cancel([gone.sequence])

    def find(self, name: str) -> ModelledSequence | None:
        return self._sequences.get(name)

    def unreported(self, name: str) -> list[StepOutput]:
        """Return the output of a sequence that is not reported yet; empty where tokens are reported with each step."""
        known = self._sequences.get(name)
        if self._tell_interval_ns is None or known is None or known.reported == known.total:
            return []
        return [known.unreported_now()]

    def _progress(self, sequence: ScheduledSequence) -> tuple[int, bool]:
        """Tokens whose KV is there, and whether a step under way computes more."""
        assert self._decode_run is None, "interrupt() first"
        for step in self._under_way:
            if sequence in step.batch.sequences:
                return step.batch.computed_before[step.batch.sequences.index(sequence)], True
        return sequence.computed, False

    def _sequence(self, source: EngineSequence) -> ModelledSequence:
        """The sequence with its stream of tokens. A replay of a recorded run gives it the recorded ones instead."""
        return ModelledSequence(
            source,
            vocabulary=self._vocabulary,
            table=self._table,
            lengths=self._lengths,
            max_model_len=self.parameters.max_model_len,
            noise=self.noise,
        )

    def _refusal(self, source: EngineSequence) -> str | None:
        tokens = len(source.prompt_token_ids) + len(source.output_token_ids)
        if source.sequence in self._sequences:
            return f"sequence {source.sequence} is in the engine already"
        if not source.prompt_token_ids:
            return "prompt_token_ids: the prompt is empty"
        if tokens >= self.parameters.max_model_len:
            limit = self.parameters.max_model_len
            return f"prompt_token_ids: {tokens} tokens leave no room for output in max_model_len = {limit}"
        size = self._vocabulary.size
        if min(source.prompt_token_ids) < 0 or (size is not None and max(source.prompt_token_ids) >= size):
            return "prompt_token_ids: an id is not in the vocabulary" + (f", 0 to {size - 1}" if size else "")
        if len(source.output_token_ids) >= source.sampling.max_tokens:
            return f"max_tokens: {source.sampling.max_tokens}, with {len(source.output_token_ids)} tokens already there"
        return sampling_refusal(source.sampling)

    def cancel(self, sequences: list[str]) -> bool:
        """Takes sequences out, frees their blocks, and returns whether any was here. Unknown ids are no error."""
        known = [self._sequences.pop(name) for name in sequences if name in self._sequences]
        for sequence in known:
            self.moves.coming.pop(sequence.sequence, None)
            self.scheduler.remove(sequence)
        return bool(known)

    def limit_step(self, tokens: int) -> None:
        """Bounds the tokens of the next steps, after interrupt(); 0 for the configured budget."""
        assert self._decode_run is None
        self.scheduler.limit_step(tokens)

    def begin_step(self, now_ns: int, span_ns: int = 0) -> int | None:
        """Starts as many steps as the engine keeps under way (one, or two with async scheduling), or a run of decode
        steps that reaches ``span_ns`` where they are all alike (see runs.py; not without ``tell_interval_ns``).

        Returns: Time until the first of them, or the run, ends, ns; None when there is nothing to compute.
        """
        if span_ns and self._tell_interval_ns is not None and not self._under_way:
            self._decode_run = self._plan_run(now_ns, span_ns)
            if self._decode_run is not None:
                return self._decode_run.ends_ns(self._decode_run.steps) - now_ns
        while len(self._under_way) < self._depth and self.scheduler.has_work():
            if not self.schedule(now_ns).sequences:
                break
        return max(0, self._under_way[0].ends_ns - now_ns) if self._under_way else None

    def _plan_run(self, now_ns: int, span_ns: int) -> DecodeRun | None:
        scheduler = self.scheduler
        if self.parameters.async_scheduling or self.slowed is not None or not scheduler.only_decodes():
            return None
        steps, context = decodes_left(scheduler.running)  # type: ignore[arg-type]
        if steps < 2:
            return None
        longest = max(sequence.total for sequence in scheduler.running) if self.cost.tail_token else 0
        first = BatchComposition(decodes=len(scheduler.running), context_tokens=context, longest_context=longest)
        run = DecodeRun(self.cost, first, begins_ns=now_ns, remainder_fs=self._remainder_fs)
        run.limit(steps, span_ns)
        run.steps = scheduler.steps_with_blocks(scheduler.running, run.steps)
        return run if run.steps > 1 else None

    def interrupt(self, now_ns: int) -> int | None:
        """Ends a run with the step that is under way at ``now_ns``. Call it before adding or cancelling anything.

        Returns: when that step ends, ns; None where no run is under way.
        """
        run, self._decode_run = self._decode_run, None
        if run is None:
            return None
        done = run.under_way(now_ns) - 1
        if done:
            self._advance_run(run, done)
        self.schedule(run.ends_ns(done) if done else run.begins_ns)
        return self._under_way[0].ends_ns

    def _advance_run(self, run: DecodeRun, steps: int) -> list[ModelledSequence]:
        """Computes that many steps of a run.

        Returns: the sequences whose token of the last one is still to be sampled, because it may end them.
        """
        ending: list[ModelledSequence] = []
        running: list[ModelledSequence] = self.scheduler.running  # type: ignore[assignment]
        for sequence in running:
            if sequence.total + steps >= sequence.check_at:
                ending.append(sequence)
                sequence.extend(steps - 1)
            elif sequence.counts_only:
                sequence.total += steps
            else:
                sequence.extend(steps)
        self.scheduler.advance_decodes(steps)
        self._step += steps
        self.output_tokens += steps * len(self.scheduler.running)
        self._remainder_fs = run.elapsed_fs(steps) % FS_PER_NS
        self._done.add_run(run.first, steps, run.ends_ns(steps) - run.begins_ns, last=run.last(steps))
        return ending

    def _complete_run(self, run: DecodeRun, now_ns: int) -> list[StepOutput]:
        ending = self._advance_run(run, run.steps)
        outputs = [self._advance_fully(sequence, sequence.next_token()) for sequence in ending]
        return outputs + self._tell_if_due(now_ns)

    def _tell_if_due(self, now_ns: int) -> list[StepOutput]:
        """Return the output that is not reported yet; empty where the last report is too recent."""
        assert self._tell_interval_ns is not None
        if now_ns - self._reported_ns < self._tell_interval_ns:
            return []
        self._reported_ns = now_ns
        known = (*self.scheduler.running, *self.scheduler.waiting)
        return [
            s.unreported_now()
            for s in known
            if isinstance(s, ModelledSequence) and s.announced and s.reported < s.total
        ]

    def schedule(self, now_ns: int) -> Batch:
        """Schedules one step behind those under way. ``begin_step`` does so as often as the engine would."""
        batch = self.scheduler.schedule()
        if batch.sequences:
            begins_ns = self._under_way[-1].ends_ns if self._under_way else now_ns
            self._under_way.append(self._started(batch, begins_ns))
        return batch

    def _started(self, batch: Batch, begins_ns: int) -> Step:
        for sequence in batch.sequences[-batch.admitted :] if batch.admitted else ():
            assert isinstance(sequence, ModelledSequence)
            sequence.scheduled_ns = sequence.scheduled_ns or begins_ns
        composition = batch.composition(with_longest=self.cost.tail_token > 0)
        cost_fs = self.cost.duration_fs(composition) + self._remainder_fs
        if self.slowed is not None:
            cost_fs = round(cost_fs * self.slowed())
        duration_ns, self._remainder_fs = divmod(cost_fs, FS_PER_NS)
        return Step(batch, composition, begins_ns + duration_ns, duration_ns)

    def complete_step(self, now_ns: int, *, with_snapshot: bool = True) -> EngineStepped:
        """Ends the oldest step, or the run, under way: samples its tokens and frees what finished. Call it when its
        time is over.
        """
        run, self._decode_run = self._decode_run, None
        outputs = self._complete_one(now_ns) if run is None else self._complete_run(run, now_ns)
        snapshot = self.snapshot(now_ns) if with_snapshot else None
        return EngineStepped(step=self._step, at_ns=now_ns, outputs=outputs, snapshot=snapshot)

    def _complete_one(self, now_ns: int) -> list[StepOutput]:
        step = self._under_way.popleft()
        self._step += 1
        self.output_tokens += len(step.batch.sampling)
        self._done.add(step.composition, step.duration_ns)
        if self.parameters.async_scheduling:
            return self._sample_async(step.batch)
        if self._tell_interval_ns is not None:
            return self._sample_quietly(step.batch) + self._tell_if_due(now_ns)
        return self._sample(step.batch)

    def step(self, now_ns: int) -> tuple[EngineStepped, int] | None:
        """Begins and completes one step.

        Returns: what it gave, stamped with its end, and its duration; None where there is nothing to compute.
        """
        duration_ns = self.begin_step(now_ns)
        if duration_ns is None:
            return None
        return self.complete_step(now_ns + duration_ns), duration_ns

    def _sample(self, batch: Batch) -> list[StepOutput]:
        running = SequenceState.RUNNING
        return [self._advance(sequence) for sequence in batch.sampling if sequence.state is running]  # type: ignore[arg-type]

    def _sample_quietly(self, batch: Batch) -> list[StepOutput]:
        """The same where only the first and the last token are reported at once."""
        outputs = []
        running = SequenceState.RUNNING
        sampling: list[ModelledSequence] = batch.sampling  # type: ignore[assignment]
        for sequence in sampling:
            if sequence.state is not running:
                continue
            if sequence.total + 1 < sequence.check_at and sequence.announced and sequence.logprobs is None:
                if sequence.counts_only:
                    sequence.total += 1
                else:
                    sequence.extend(1)
            else:
                outputs.append(self._advance_fully(sequence, sequence.next_token()))
        return outputs

    def _sample_async(self, batch: Batch) -> list[StepOutput]:
        """The same where the next step is scheduled already, and a sequence may have been preempted since."""
        outputs = []
        sampling = set(batch.sampling)
        for sequence in batch.sequences:
            assert isinstance(sequence, ModelledSequence)
            fresh = self.scheduler.settle(sequence)
            if sequence not in sampling or sequence.state is None:
                continue
            if fresh:
                sequence.placeholders -= 1
            outputs.append(self._advance(sequence))
        return outputs

    def _advance(self, sequence: ModelledSequence) -> StepOutput:
        """Appends the next token of a sequence and ends it where that was its last."""
        token = sequence.next_token()
        if sequence.total + 1 < sequence.check_at and sequence.announced and sequence.logprobs is None:
            sequence.append(token)
            if self.parameters.async_scheduling:
                self.scheduler.name_settled(sequence)
            return StepOutput(sequence=sequence.sequence, token_ids=[token], preemptions=sequence.preemptions)
        return self._advance_fully(sequence, token)

    def _advance_fully(self, sequence: ModelledSequence, token: int) -> StepOutput:
        """The same where the output says more than a token: a first one, a last one, or log-probabilities."""
        logprobs = None if sequence.logprobs is None else [sequence.token_logprobs(token)]
        sequence.append(token)
        finish = sequence.ended(token)
        if self.parameters.async_scheduling:
            self.scheduler.name_settled(sequence)
        if finish is not None:
            del self._sequences[sequence.sequence]
            self.scheduler.remove(sequence)
        first, sequence.announced = not sequence.announced, True
        token_ids = [token] if self._tell_interval_ns is None else sequence.unreported()
        return StepOutput(
            sequence=sequence.sequence,
            token_ids=token_ids,
            finish=finish,
            logprobs=logprobs,
            scheduled_ns=sequence.scheduled_ns if first else 0,
            cached_tokens=sequence.hit_tokens if first else None,
            preemptions=sequence.preemptions,
        )

    def snapshot(self, now_ns: int) -> EngineSnapshot:
        scheduler = self.scheduler
        running = statuses(scheduler.running) + self.moves.standing()
        return EngineSnapshot(
            step=self._step,
            at_ns=now_ns,
            running=running if self.estimated is None else [self.estimated(status) for status in running],
            waiting=statuses(scheduler.arrived) + statuses(scheduler.waiting),
            blocks_free=scheduler.pool.free + self.moves.arrivals.yielding,
            blocks_total=scheduler.pool.blocks_total,
            preemptions=scheduler.preemptions,
            step_duration_ns=self._done.last_ns,
            batch=self._done.last,
            totals=self._done.totals(),
            token_budget=scheduler.token_budget if scheduler.token_budget < self.parameters.token_budget else 0,
        )

    def check_invariants(self) -> None:
        self.scheduler.check_invariants()
        self.moves.check_invariants()
        lanes = self.scheduler.running, self.scheduler.waiting, self.scheduler.arrived, self.scheduler.frozen
        here = {each.sequence for lane in lanes for each in lane} | set(self.moves.coming)
        assert here == set(self._sequences), "scheduler and engine know different sequences"
