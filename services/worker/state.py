"""A worker's state of each sequence, and the ledger that bounds its size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec
from millrace.contracts.ingress import EngineTimes, FinishReason, TokenChunk, TokenLogprobs
from millrace.contracts.migration import SequenceMoved
from millrace.contracts.worker import SubmitSequence

#: Epoch fences kept for sequences that are gone: at 100 requests a second this is a quarter of an hour of replays.
FENCES_MAX = 100_000
#: Most reply addresses kept for one sequence that the engine has not answered for yet: retries of one ingress.
WAITERS_MAX = 4
#: Tokens with alternatives in one message: 20 alternatives take about 300 bytes a token, so 600 KB at most.
LOGPROB_TOKENS_MAX = 2_000


@dataclass(slots=True, kw_only=True)
class Held:
    """One sequence in one epoch, from submit until it is acknowledged, cancelled, returned or forgotten.

    Attributes:
        base_index: The index of ``token_ids[0]`` in the whole sequence: output tokens of earlier epochs, but for those
            that a migrated sequence brought, which ingress may still lack.
        token_ids: Brought, then generated here in this epoch.
        brought: How many of them were brought.
        submission: As it came; the prompt is shared with the engine's.
        moved: What ingress is told of a sequence that was migrated here; None for one that was not.
        logprobs: One entry per token where asked for, else None.
        prompt_logprobs: Sent with the first token.
        pooled: Pieces of a pooled output, one per token; None for a text.
        sent: Number of ``token_ids`` that went out at least once.
        mark_recent: ``len(token_ids)`` at the last tick.
        mark_older: The same one tick earlier; what came after it may have been lost when the bus went away.
        scheduled_ns: When it first entered a batch; 0 before.
        waiters: Reply addresses (with traceparent) that want to know whether the engine took it.
    """

    sequence: str
    epoch: int
    ingress: str
    ingress_incarnation: int
    traceparent: str
    prompt_tokens: int
    base_index: int
    max_tokens: int
    received_ns: int
    deadline_ns: int | None = None
    submission: SubmitSequence | None = None
    brought: int = 0
    moved: SequenceMoved | None = None
    added: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    pooled: list[bytes] | None = None
    finish: FinishReason | None = None
    detail: str = ""
    cached_tokens: int | None = None
    preemptions: int = 0
    sent: int = 0
    finish_sent: bool = False
    mark_recent: int = 0
    mark_older: int = 0
    scheduled_ns: int = 0
    first_token_ns: int = 0
    finished_ns: int = 0
    waiters: list[str] = field(default_factory=list)

    @property
    def live(self) -> bool:
        """Whether the engine still works on it."""
        return self.finish is None

    @property
    def entered(self) -> int:
        """Output tokens that it came with."""
        return self.base_index + self.brought

    @property
    def to_compute(self) -> int:
        """Tokens that the engine has to compute before it decodes; those of a migrated one came, as a rule."""
        if self.moved is None:
            return self.prompt_tokens + self.base_index
        came = self.submission is not None and self.submission.handover is not None
        return 1 if came else self.prompt_tokens + self.moved.first_index

    def output_token_ids(self) -> list[int]:
        """All output tokens, earlier epochs included."""
        earlier = self.submission.output_token_ids[: self.base_index] if self.submission is not None else []
        return earlier + self.token_ids

    def submission_now(self) -> SubmitSequence | None:
        """The submission as if it came now: with every token so far, and without the handover that it came by."""
        if self.submission is None:
            return None
        return msgspec.structs.replace(
            self.submission,
            output_token_ids=self.output_token_ids(),
            handover=None,
            output_logprobs=None,
            migration="",
            replica="",
        )

    def chunk(self, start: int) -> TokenChunk:
        """Everything known from local index ``start`` on, cut where alternatives or pieces would make it too large."""
        if start and self.finish is None and self.logprobs is None:  # nearly always
            return TokenChunk(self.sequence, self.epoch, self.base_index + start, self.token_ids[start:])
        stop = len(self.token_ids)
        if self.logprobs is not None:
            stop = min(stop, start + LOGPROB_TOKENS_MAX)
        if self.pooled is not None:
            stop = min(stop, start + 1)
        whole = stop == len(self.token_ids)
        return TokenChunk(
            sequence=self.sequence,
            epoch=self.epoch,
            first_index=self.base_index + start,
            token_ids=self.token_ids[start:stop],
            finish=self.finish if whole else None,
            logprobs=self.logprobs[start:stop] if self.logprobs is not None else None,
            cached_tokens=self.cached_tokens if start == 0 else None,
            prompt_logprobs=self.prompt_logprobs if start == 0 else None,
            detail=self.detail if whole else "",
            times=self._times() if whole and self.finish is not None else None,
            pooled=self.pooled[start:stop] if self.pooled is not None else None,
        )

    def _times(self) -> EngineTimes | None:
        first, scheduled = self.first_token_ns, self.scheduled_ns
        if not (first and scheduled):
            return None
        return EngineTimes(
            max(0, scheduled - self.received_ns), first - scheduled, self.finished_ns - scheduled, self.preemptions
        )

    def take_unsent(self) -> TokenChunk:
        """The chunk of what has not gone out yet, which counts as sent from now on."""
        chunk = self.chunk(self.sent)
        self.sent += len(chunk.token_ids)
        if chunk.finish is not None:
            self.finish_sent = True
        return chunk

    def tick(self) -> None:
        """Moves the marks: called once a second while the bus is there."""
        self.mark_older = self.mark_recent
        self.mark_recent = len(self.token_ids)


class Ledger:
    """All sequences of a worker, the fences of those that are gone, and the counts of what was dropped."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}
        self._fences: dict[str, int] = {}
        self.live = 0
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Held]:
        return iter(self._held.values())

    def get(self, sequence: str) -> Held | None:
        """The sequence, live or finished; None where it is unknown or gone."""
        return self._held.get(sequence)

    def admit(self, held: Held) -> None:
        """Takes a new sequence; one of an older epoch must have been dropped before."""
        assert held.sequence not in self._held
        self._held[held.sequence] = held
        self.live += 1
        self.fence(held.sequence, held.epoch)

    def finish(self, held: Held, finish: FinishReason, now_ns: int, detail: str = "") -> None:
        """Notes the end; the tokens stay until they are acknowledged or forgotten."""
        assert held.live
        held.finish = finish
        held.detail = detail
        held.finished_ns = now_ns
        held.submission = None
        self.live -= 1

    def drop(self, held: Held) -> None:
        """Removes a sequence with its tokens; its fence stays."""
        del self._held[held.sequence]
        if held.live:
            self.live -= 1

    def retract(self, held: Held) -> None:
        """Removes a sequence that the engine refused, fence included: it was never owned here."""
        self.drop(held)
        if self._fences.get(held.sequence) == held.epoch:
            del self._fences[held.sequence]

    def fence(self, sequence: str, epoch: int) -> None:
        """Refuses this epoch and older ones from now on, unless it is the one held."""
        self._fences[sequence] = max(epoch, self._fences.pop(sequence, epoch))
        if len(self._fences) > FENCES_MAX:
            del self._fences[next(iter(self._fences))]

    def fenced(self, sequence: str) -> int | None:
        """The newest epoch known of a sequence; None where nothing is known."""
        return self._fences.get(sequence)

    def of_ingress(self, ingress: str, *, incarnation_max: int | None = None) -> list[Held]:
        """Sequences of an ingress, at most up to an incarnation."""
        return [
            held
            for held in self
            if held.ingress == ingress and (incarnation_max is None or held.ingress_incarnation <= incarnation_max)
        ]

    def forget(self, now_ns: int, *, ttl_ns: int, finished_max: int) -> list[Held]:
        """Drops finished sequences that nobody acknowledged in time, or that are too many; oldest first."""
        finished = [held for held in self._held.values() if held.finish is not None]
        if not finished:
            return finished
        finished.sort(key=lambda held: held.finished_ns)
        excess = len(finished) - finished_max
        old = [h for index, h in enumerate(finished) if index < excess or now_ns - h.finished_ns >= ttl_ns]
        for held in old:
            self.drop(held)
        self.forgotten += len(old)
        return old

    def check(self) -> None:
        assert self.live == sum(held.live for held in self), "live count"
        for held in self:
            assert held.sent <= len(held.token_ids), held.sequence
            assert held.logprobs is None or len(held.logprobs) == len(held.token_ids), held.sequence
            fence = self._fences.get(held.sequence)
            assert fence is None or fence >= held.epoch, held.sequence


def by_ingress(sequences: Iterable[Held]) -> dict[str, list[Held]]:
    """Groups sequences by their ingress, in order of first appearance."""
    groups: dict[str, list[Held]] = {}
    for held in sequences:
        group = groups.get(held.ingress)
        if group is None:
            groups[held.ingress] = [held]
        else:
            group.append(held)
    return groups
