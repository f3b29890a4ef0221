"""Messages from a worker to ingresses: tokens, repeated tokens after an outage, and sequences handed back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from millrace.actor.effects import Effect, Publish
from millrace.contracts.ingress import ReturnReason, SequencesReturned, TokenChunk, TokensGenerated
from millrace.contracts.subjects import Subjects

from services.worker.identity import Identity
from services.worker.metrics import WorkerFigures
from services.worker.state import Held, by_ingress

#: Chunks in one repeat message after an outage: a chunk of a plain sequence is at most some 10 KB.
REPEAT_CHUNKS_MAX = 32
#: Bytes of pooled outputs in one message: half of what a message may have.
POOLED_BYTES_MAX = 500_000


class TokenOutbox:
    """Builds messages to ingresses and marks what has been sent. Holds no sequence itself."""

    def __init__(self, *, identity: Identity, subjects: Subjects, figures: WorkerFigures) -> None:
        self._identity = identity
        self._subjects = subjects
        self._figures = figures

    def tokens(self, touched: Iterable[Held], *, step: int) -> list[Effect]:
        """Send the unsent tokens of these sequences: one message per ingress, more where outputs are pooled."""
        effects: list[Effect] = []
        for ingress, group in by_ingress(touched).items():
            chunks = [held.take_unsent() for held in group]
            if all(chunk.pooled is None for chunk in chunks):
                effects.append(self._message(ingress, step, chunks))
                continue
            for held in group:
                while held.pooled is not None and not held.finish_sent:
                    chunks.append(held.take_unsent())
            effects += [self._message(ingress, step, part) for part in _parts(chunks, len(chunks))]
        return effects

    def repeat(self, sequences: Iterable[Held], *, step: int) -> list[Effect]:
        """Everything since each sequence's older mark once more: it may have been lost with the bus."""
        return self._repeated(sequences, _since_mark, step)

    def remind(self, finished: Iterable[Held], *, step: int) -> list[Effect]:
        """The end of each sequence once more, without its tokens: whoever lacks some sees the gap and asks."""
        return self._repeated(finished, lambda held: [held.chunk(len(held.token_ids))], step)

    def _repeated(
        self, sequences: Iterable[Held], chunks_of: Callable[[Held], list[TokenChunk]], step: int
    ) -> list[Effect]:
        effects: list[Effect] = []
        for ingress, group in by_ingress(sequences).items():
            chunks = [chunk for held in group for chunk in chunks_of(held)]
            effects += [self._message(ingress, step, part) for part in _parts(chunks, REPEAT_CHUNKS_MAX)]
        return effects

    def returned(self, live: Iterable[Held], reason: ReturnReason) -> list[Effect]:
        """Hands sequences back: one message per ingress."""
        return [self._returned(ingress, group, reason) for ingress, group in by_ingress(live).items()]

    def _returned(self, ingress: str, group: list[Held], reason: ReturnReason) -> Effect:
        self._figures.returned[reason] += len(group)
        body = SequencesReturned(
            instance=self._identity.instance,
            incarnation=self._identity.incarnation,
            reason=reason,
            sequences=[(held.sequence, held.epoch) for held in group],
        )
        return Publish(subject=self._subjects.returned(ingress), body=body)

    def _message(self, ingress: str, step: int, chunks: list[TokenChunk]) -> Effect:
        self._figures.token_messages += 1
        body = TokensGenerated(
            instance=self._identity.instance, incarnation=self._identity.incarnation, step=step, chunks=chunks
        )
        return Publish(subject=self._subjects.tokens(ingress), body=body)


def _parts(chunks: list[TokenChunk], chunks_max: int) -> Iterator[list[TokenChunk]]:
    """Chunks of one message each."""
    part: list[TokenChunk] = []
    size = 0
    for chunk in chunks:
        more = sum(map(len, chunk.pooled or ()))
        if part and (len(part) == chunks_max or size + more > POOLED_BYTES_MAX):
            yield part
            part, size = [], 0
        part.append(chunk)
        size += more
    if part:
        yield part


def _since_mark(held: Held) -> list[TokenChunk]:
    held.sent = min(held.sent, held.mark_older)
    chunks: list[TokenChunk] = []
    while held.sent < len(held.token_ids) or (held.finish is not None and not chunks):
        chunks.append(held.take_unsent())
    return chunks
