"""One sequence of a modelled engine: what it says next, and when it ends."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from millrace.actor.engine import EngineSequence
from millrace.contracts.ingress import FinishReason, TokenLogprobs
from millrace.enginemodel.sequence import ScheduledSequence
from millrace.enginemodel.tokens import CHUNK, OutputLengths, Vocabulary, stream_chunk, stream_key


class ModelledSequence(ScheduledSequence):
    """A scheduled sequence with its stream of tokens.

    Attributes:
        check_at: ``total`` from which on the end must be checked after each token; until then no token can end it.
        scheduled_ns: When it first entered a batch; 0 before.
        announced: Whether an output told ``scheduled_ns`` and the cached tokens.
        told: ``total`` as far as outputs told its tokens, where they are not told with each step.
        counts_only: Whether tokens between first and last are only counted: ``extend`` does nothing else.
    """

    __slots__ = (
        "_buffer",
        "_chunk",
        "_eos_index",
        "_eos_token_id",
        "_key",
        "_stops",
        "_stops_from",
        "_table",
        "_total_limit",
        "announced",
        "check_at",
        "counts_only",
        "expected_output_tokens",
        "logprobs",
        "scheduled_ns",
        "told",
    )

    def __init__(
        self,
        source: EngineSequence,
        *,
        vocabulary: Vocabulary,
        table: list[int],
        lengths: OutputLengths,
        max_model_len: int,
    ) -> None:
        sampling = source.sampling
        super().__init__(
            source.sequence,
            source.prompt_token_ids + source.output_token_ids,
            prompt_tokens=len(source.prompt_token_ids),
            max_tokens=sampling.max_tokens,
            arrival_ns=source.arrival_ns,
            priority=source.priority,
        )
        self.expected_output_tokens = source.expected_output_tokens
        self.logprobs = sampling.logprobs
        self.scheduled_ns = 0
        self.announced = False
        self.told = self.total
        self.counts_only = False
        self._table = table
        self._key = stream_key(source.prompt_token_ids, sampling.seed)
        self._buffer: list[int] = []
        self._chunk = -1
        self._stops = frozenset(sampling.stop_token_ids)
        self._stops_from = sampling.min_tokens
        self._eos_token_id = vocabulary.eos_token_id
        # Index of the output token that is EOS; past every limit where the client wants none.
        natural = max(lengths.length(self._key) - 1, sampling.min_tokens)
        self._eos_index = sampling.max_tokens if sampling.ignore_eos else natural
        self._total_limit = min(self.prompt_tokens + sampling.max_tokens, max_model_len)
        ends_at = min(self.prompt_tokens + self._eos_index + 1, self._total_limit)
        self.check_at = 0 if self._stops else ends_at

    def extend(self, steps: int) -> None:
        """Samples and appends so many tokens, none of which can end it."""
        for _ in range(steps):
            self.token_ids.append(self.next_token())
            self.total += 1

    def untold(self) -> list[int]:
        """Tokens that no output told; from now on they count as told."""
        token_ids = self.token_ids[self.told :]
        self.told = self.total
        return token_ids

    def next_token(self) -> int:
        """The token at the current position. Does not append it."""
        index = self.total - self.prompt_tokens
        if index == self._eos_index:
            return self._eos_token_id
        chunk = index // CHUNK
        if chunk != self._chunk:
            self._chunk = chunk
            self._buffer = stream_chunk(self._key, chunk, self._table)
        token = self._buffer[index % CHUNK]
        if index < self._stops_from and token in self._stops:
            return self._unstopping(token)
        return token

    def poison(self) -> None:
        """Its KV is not its own: from now on it says other tokens, as a real model would."""
        self._key = hashlib.blake2b(self._key, digest_size=16, person=b"poisoned").digest()
        self._chunk = -1

    def _unstopping(self, token: int) -> int:
        """A neighbour of ``token`` that is no stop token: min_tokens forbids those. The same token if all are."""
        allowed = [candidate for candidate in sorted(set(self._table)) if candidate not in self._stops]
        return allowed[token % len(allowed)] if allowed else token

    def ended(self, token: int) -> FinishReason | None:
        """Why the sequence ends with this token, just appended; None where it goes on."""
        index = self.total - self.prompt_tokens - 1
        if index == self._eos_index or (index >= self._stops_from and token in self._stops):
            return FinishReason.STOP
        if self.total >= self._total_limit:
            return FinishReason.LENGTH
        return None

    def token_logprobs(self, token: int) -> TokenLogprobs:
        """Log-probabilities for the token at the current position: plausible, falling, and always the same."""
        assert self.logprobs is not None
        return modelled_logprobs(self._key, self.total, token, sorted({*self._table, token}), self.logprobs)


def modelled_logprobs(key: bytes, position: int, token: int, ids: Sequence[int], count: int) -> TokenLogprobs:
    """The chosen token with a probability between 0.5 and 0.95; each next one has a third of what is left."""
    digest = hashlib.blake2b(key + position.to_bytes(8, "big"), digest_size=4, person=b"logprobs").digest()
    first = digest[0] % len(ids)
    share = 0.5 + 0.45 * int.from_bytes(digest[1:3], "big") / 0xFFFF
    others = [candidate for candidate in (*ids[first:], *ids[:first]) if candidate != token]
    top, probabilities, rest = [token], [share], 1.0 - share
    for candidate in others[: max(0, count - 1)]:
        rest *= 2 / 3
        top.append(candidate)
        probabilities.append(min(rest / 2, share))
    return _token_logprobs(token, top[:count] if count else [], probabilities)


def _token_logprobs(token: int, top: list[int], probabilities: list[float]) -> TokenLogprobs:
    from math import log

    logprobs = [log(probability) for probability in probabilities]
    return TokenLogprobs(token_ids=[token, *top], logprobs=[logprobs[0], *logprobs[: len(top)]], rank=1)
