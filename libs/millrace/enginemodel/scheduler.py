"""The scheduling rules of a vLLM V1 engine, as pure code: what the next step computes.

Running sequences come first, in the order of their admission; each gets what it still has to compute, within the
token budget. One that needs a block when none is free preempts the newest, which loses
all its blocks and waits again. Where none was preempted, waiting sequences are admitted while budget, blocks and
places last, after a look into the prefix cache. README.md tells the rules in full, and how they are checked against
vLLM itself.

A frozen sequence keeps its blocks and its place in the batch, and is in no step. Room set aside for a sequence to come
from another engine is blocks and a place, too. One that has come keeps both until the next step: it is admitted before
all that wait, and prompts under way leave it a token of the budget.

Invariants: the blocks of all sequences, of replicas, those set aside and the free ones make up the pool; a waiting
sequence holds no block; running, frozen and set aside are at most ``max_sequences``; no step exceeds the budget.
"""

from __future__ import annotations

from collections import deque

from millrace.contracts.kv import KvGroup, KvNeed
from millrace.contracts.scheduler import step_budget
from millrace.contracts.status import SequenceState
from millrace.enginemodel.batch import Batch
from millrace.enginemodel.block_tables import BlockTables
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.sequence import ScheduledSequence


class Scheduler(BlockTables):
    """Sole owner of running list, waiting queue and block pool of one engine.

    Attributes:
        waiting: First come, first served; the preempted go to the head.
        arrived: Sequences that came with their KV and were in no step yet; they hold blocks, and each a place.
        frozen: Sequences that stand still, with the index in ``running`` that each had.
        aside: Blocks for sequences to come, by migration.
        token_budget: Of the next step: the configured one, or a smaller one.
    """

    def __init__(self, parameters: EngineParameters) -> None:
        super().__init__(parameters)
        self.running: list[ScheduledSequence] = []
        self.waiting: deque[ScheduledSequence] = deque()
        self.preemptions = 0
        self.arrived: deque[ScheduledSequence] = deque()
        self.frozen: dict[ScheduledSequence, int] = {}
        self.aside: dict[str, list[int]] = {}
        self.token_budget = parameters.token_budget

    def add(self, sequence: ScheduledSequence) -> None:
        """Puts a new sequence into the waiting queue."""
        self.waiting.append(sequence)

    def remove(self, sequence: ScheduledSequence) -> None:
        """Takes a finished or cancelled sequence out and frees its blocks. Its ``state`` becomes None."""
        if sequence in self.frozen:
            del self.frozen[sequence]
        elif sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
        elif sequence.state is not None:
            (self.arrived if sequence.blocks else self.waiting).remove(sequence)
        sequence.state = None
        self._release(sequence)

    def limit_step(self, tokens: int) -> None:
        """Bounds the tokens of the steps to come; 0 for the configured budget."""
        self.token_budget = step_budget(self.parameters, tokens)

    def has_work(self) -> bool:
        """Whether any sequence is here that does not stand still."""
        return bool(self.running) or len(self.waiting) > 0 or len(self.arrived) > 0

    def schedule(self) -> Batch:
        """Forms the next step. An empty batch means that there is nothing to compute now."""
        batch = Batch()
        self._form(batch)
        if batch.preempted and not batch.sequences:
            self._form(batch)  # the only one that ran made room: that step computes nothing, and the next one follows
        if self.parameters.async_scheduling:
            batch.note_in_flight()
        return batch

    def _form(self, batch: Batch) -> None:
        preempted, threshold = len(batch.preempted), self._chunk_limit()
        budget = self._schedule_running(batch, threshold)
        if len(batch.preempted) == preempted and budget > 0 and (len(self.waiting) or len(self.arrived)):
            self._admit(batch, budget, threshold)

    def settle(self, sequence: ScheduledSequence) -> bool:
        """Async scheduling only: says that a step of this sequence ended, before its token is appended.

        Returns: False where the step was scheduled before a preemption: its token counts, its KV is gone.
        """
        sequence.in_flight -= 1
        if sequence.stale:
            sequence.stale -= 1
            return False
        return True

    def name_settled(self, sequence: ScheduledSequence) -> None:
        """Async scheduling only: enters the blocks into the prefix index whose tokens the last step made known."""
        if sequence.state is SequenceState.RUNNING:
            self._name_blocks(sequence, sequence.computed - sequence.placeholders)

    # Moving (leases.py, arrivals.py)

    def places(self) -> int:
        """Return the number of sequences that may run besides those that run or already have a place."""
        return self._places_for_arrived() - len(self.arrived)

    def _places_for_arrived(self) -> int:
        held = len(self.running) + len(self.frozen) + len(self.aside)
        return self.parameters.max_sequences - held

    def freeze(self, sequence: ScheduledSequence) -> None:
        """Takes a running sequence out of the steps to come."""
        index = self.running.index(sequence)
        del self.running[index]
        self.frozen[sequence] = index

    def thaw(self, sequence: ScheduledSequence) -> None:
        """Puts a frozen sequence back where it stood, as far as that place is still there."""
        self.running.insert(self.frozen.pop(sequence), sequence)

    def adopt(self, sequence: ScheduledSequence, blocks: list[int], *, computed: int, named: int) -> None:
        """Takes a sequence whose KV came from elsewhere.

        Args:
            blocks: Held for it already, and its own from now on; enough for all its tokens.
            computed: Tokens whose KV is in them, at least 1.
            named: So many of them came out of the prefix index.
        """
        self.arrived.append(sequence)
        sequence.blocks = blocks
        sequence.slots = len(blocks) * self.parameters.block_size
        sequence.named_blocks = named
        sequence.computed = computed
        sequence.hit_tokens = min(computed, sequence.prompt_tokens)
        if self.contents is not None:
            self.contents.found(sequence, computed)
        self._name_blocks(sequence, computed)
        if self.beside:
            self._keep_beside(sequence, sequence.total)

    # Runs of decode steps (runs.py)

    def only_decodes(self) -> bool:
        """Whether the next steps admit none, as long as every running sequence just decodes and none ends.

        With prefix caching a block that a running sequence fills may be the one that the first in the queue lacks, so
        that only a full batch keeps it out for certain.
        """
        running = len(self.running)
        budget = self.token_budget - running
        if not running or budget < 0 or len(self.arrived) or self.beside:
            return False
        if not len(self.waiting) or budget == 0 or self.places() <= 0:
            return True
        if self.parameters.prefix_caching or self.replicas:
            return False
        sequence = self.waiting[0]
        count = self._first_chunk(sequence, 0, budget, self._chunk_limit())
        return count == 0 or self._needed(sequence, [], count) > self.pool.free

    def advance_decodes(self, steps: int) -> None:
        """Computes ``steps`` tokens of every running sequence, whose tokens are there already, with the blocks that
        this takes and names in the order in which single steps would.
        """
        block_size, caching = self.parameters.block_size, self.parameters.prefix_caching
        needs: list[tuple[int, int, bool]] = []
        for index, sequence in enumerate(self.running):
            before = sequence.computed
            sequence.computed = end = before + steps
            if end >= sequence.slots:
                at = sequence.slots - before + 1
                while at <= steps:
                    needs.append((at, index, True))
                    at += block_size
                if caching:
                    needs += [
                        (at, index, False) for at in range(-before % block_size or block_size, steps + 1, block_size)
                    ]
        needs.sort()
        blocks = iter(self.pool.take(sum(take for _at, _index, take in needs)))
        for _at, index, take in needs:
            sequence = self.running[index]
            if take:
                sequence.blocks.append(next(blocks))
                sequence.slots += block_size
            else:
                self._name_blocks(sequence, (sequence.named_blocks + 1) * block_size)

    # Running sequences

    def _schedule_running(self, batch: Batch, threshold: int) -> int:
        """Gives running sequences their tokens. Returns what is left of the budget."""
        budget = self.token_budget
        running = self.running
        index = 0
        while index < len(running) and budget > 0:
            sequence = running[index]
            if not self.beside and batch.put_decode(sequence):
                budget -= 1
                index += 1
                continue
            count = self._wanted(sequence, budget, threshold)
            if count == 0:
                index += 1
                continue
            end = sequence.computed + count
            if end >= sequence.slots or self.beside:  # a block fills, or is needed, or a window leaves one
                while self._lacking(sequence, end) > self.pool.free:
                    if self.replicas and self.make_room(self.pool.free + 1):
                        continue
                    victim = self.running.pop()
                    self._preempt(victim)
                    batch.preempted.append(victim)
                    if victim is sequence:
                        return budget
                self._grow(sequence, end)
            batch.put(sequence, count)
            budget -= count
            index += 1
        return budget

    def _lacking(self, sequence: ScheduledSequence, end: int) -> int:
        lacking = max(0, -(-(end - sequence.slots) // self.parameters.block_size))
        return lacking + self._lacks_beside(sequence, end) if self.beside else lacking

    def _wanted(self, sequence: ScheduledSequence, budget: int, threshold: int) -> int:
        """Tokens of a running sequence that this step may compute, 0 for none."""
        limit = self.parameters.max_model_len
        placeholders = sequence.placeholders
        if placeholders and sequence.computed + 2 - placeholders >= sequence.prompt_tokens + sequence.max_tokens:
            return 0  # the step under way gives its last token
        count = sequence.total + placeholders - sequence.computed
        if count == 1:  # decoding; the budget is not exhausted here
            return 1 if sequence.computed + 1 < limit else 0
        if 0 < threshold < count:
            count = threshold
        return min(count, budget, limit - sequence.computed - 1)

    def _chunk_limit(self) -> int:
        """Longest prompt chunk in this step, 0 for no bound: a sequence alone delays no other."""
        arrived = len(self.arrived)
        alone = len(self.running) + len(self.waiting) + arrived <= 1
        threshold = 0 if alone else self.parameters.long_prefill_token_threshold
        return self._chunk_beside(arrived, threshold) if arrived else threshold

    def _chunk_beside(self, arrived: int, threshold: int) -> int:
        """The same beside so many sequences that came with their KV: each is left a token of the budget, as those that
        decode are, and the prompts under way share the rest.

        Source: ``MovingMixin`` of the worker's vLLM scheduler; vLLM by itself gives a prompt all that is left.
        """
        prompts = sum(sequence.total - sequence.computed > 1 for sequence in self.running)
        if not prompts:
            return threshold
        others = len(self.running) - prompts + arrived
        chunk = max(1, (self.token_budget - others) // prompts)
        return min(threshold or chunk, chunk)

    def _preempt(self, sequence: ScheduledSequence) -> None:
        self._release(sequence)
        sequence.state = SequenceState.PREEMPTED
        sequence.computed = 0
        sequence.placeholders = 0
        sequence.stale = sequence.in_flight
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    # Sequences to be admitted

    def _admit(self, batch: Batch, budget: int, threshold: int) -> None:
        """Admits those that came with their KV, then from the queue's head, until budget, places or blocks are gone."""
        while budget > 0 and self._places_for_arrived() > 0:
            if len(self.arrived):
                count = self._admit_arrived(batch, budget, threshold)
            elif len(self.waiting):
                count = self._admit_waiting(batch, budget, threshold)
            else:
                break
            if count == 0:
                break
            batch.admitted += 1
            budget -= count

    def _admit_arrived(self, batch: Batch, budget: int, threshold: int) -> int:
        """Admits the first one that came with its KV. Returns how many tokens of it, 0 where it waits."""
        sequence = self.arrived[0]
        count = self._first_chunk(sequence, sequence.computed, budget, threshold)
        if count == 0 or not self.make_room(self._watermark()):  # the blocks themselves it has
            return 0
        self.arrived.popleft()
        self.running.append(sequence)
        sequence.state = SequenceState.RUNNING
        self._grow(sequence, sequence.computed + count)
        batch.put(sequence, count)
        return count

    def _admit_waiting(self, batch: Batch, budget: int, threshold: int) -> int:
        """Admits the first one that waits. Returns how many tokens of it, 0 where it does not fit."""
        sequence = self.waiting[0]
        hits = self._prefix_hits(sequence)
        computed = self._cached_tokens(sequence, hits)
        count = self._first_chunk(sequence, computed, budget, threshold)
        if count == 0 or not self._fits(sequence, hits, computed + count):
            return 0
        self._start(sequence, hits, computed)
        self._grow(sequence, computed + count)
        batch.put(sequence, count)
        return count

    def _first_chunk(self, sequence: ScheduledSequence, computed: int, budget: int, threshold: int) -> int:
        """Tokens of a waiting sequence that a step with this budget would compute, 0 for none."""
        count = sequence.total - computed
        if 0 < threshold < count:
            count = threshold
        if count > budget:
            return budget if self.parameters.chunked_prefill else 0
        return count

    def _prefix_hits(self, sequence: ScheduledSequence) -> list[int]:
        """Blocks of the longest cached prefix. The last token is always computed, to have its logits."""
        if not self.parameters.prefix_caching:
            return []
        block_size = self.parameters.block_size
        return self.pool.find(sequence.all_hashes(block_size), (sequence.total - 1) // block_size)

    def _cached_tokens(self, sequence: ScheduledSequence, hits: list[int]) -> int:
        """Tokens of a waiting sequence that need not be computed."""
        return len(hits) * self.parameters.block_size

    def _needed(self, sequence: ScheduledSequence, hits: list[int], tokens: int) -> int:
        """Free blocks for the first chunk, or where configured the whole prompt, beside the watermark."""
        parameters = self.parameters
        if parameters.reserve_full_prompt:
            tokens = max(tokens, min(sequence.total, parameters.max_model_len))
        beside = sum(self._admitted(group, tokens) for group in self.beside)
        needed = -(-tokens // parameters.block_size) - len(hits) + self.pool.unreferenced(hits)
        return needed + beside + self._watermark()

    def _admitted(self, group: KvGroup, tokens: int) -> int:
        """Blocks of a group for so many tokens that come in steps; its window leaves the first ones meanwhile."""
        parameters = self.parameters
        whole = group.blocks_in_step(0, tokens)
        if group.need is not KvNeed.WINDOW:
            return whole
        within = min(group.window - 1 + parameters.token_budget, parameters.max_model_len)
        return min(whole, -(-within // group.block_tokens) + 1)

    def _fits(self, sequence: ScheduledSequence, hits: list[int], tokens: int) -> bool:
        """Whether so many are free, after replicas have given way; hits that only they held are free blocks then."""
        while (needed := self._needed(sequence, hits, tokens)) > self.pool.free:
            if not self.make_room(needed):
                return False
        return True

    def _watermark(self) -> int:
        return self.parameters.watermark_blocks if self.running else 0

    def _start(self, sequence: ScheduledSequence, hits: list[int], computed: int) -> None:
        self.waiting.popleft()
        self.running.append(sequence)
        self.pool.share(hits)
        sequence.state = SequenceState.RUNNING
        sequence.blocks = hits
        sequence.slots = len(hits) * self.parameters.block_size
        sequence.named_blocks = len(hits)
        sequence.computed = computed
        if sequence.hit_tokens is None:
            sequence.hit_tokens = min(computed, sequence.prompt_tokens)
        if self.contents is not None:
            self.contents.found(sequence, computed)

    def check_invariants(self) -> None:
        self.pool.check_invariants()
        here = [*self.running, *self.frozen, *self.arrived]
        tables = (*(each.blocks + each.beside for each in here), *self.aside.values(), *self.replicas.values())
        held = {block for blocks in tables for block in blocks}
        assert len(held) + self.pool.free == self.pool.blocks_total, "a block is lost"
        assert self._places_for_arrived() >= 0, "more sequences than places"
        for sequence in here:
            assert sequence.slots == len(sequence.blocks) * self.parameters.block_size
            assert sequence.computed <= sequence.slots
            assert not self.parameters.prefix_caching or sequence.total == len(sequence.token_ids)
        assert all(sequence.state is SequenceState.RUNNING for sequence in (*self.running, *self.frozen))
        for sequence in self.arrived:
            assert sequence.state is SequenceState.WAITING
            assert 0 < sequence.computed < sequence.total <= sequence.slots, "came without its KV, or without room"
        for sequence in self.waiting:
            assert sequence.state in (SequenceState.WAITING, SequenceState.PREEMPTED)
            assert not sequence.blocks, "a waiting sequence holds blocks"
