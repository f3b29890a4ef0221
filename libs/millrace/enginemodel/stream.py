"""One sequence of a modelled engine: what it says next, and when it ends."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from zlib import crc32

from millrace.actor.engine import EngineSequence, StepOutput
from millrace.contracts.ingress import FinishReason, TokenLogprobs
from millrace.enginemodel.sequence import ScheduledSequence
from millrace.enginemodel.tokens import (
    MIX,
    ROOT,
    WORD_BYTES,
    OutputLengths,
    Vocabulary,
    kv_words,
    seed_salt,
    stream_key,
)


class ModelledSequence(ScheduledSequence):
    """A scheduled sequence with its stream of tokens: each follows from the KV that is in its blocks.

    Attributes:
        found: Tokens whose KV it found when it was admitted; it computed all behind them.
        found_digest: Of the KV that it found.
        borders: Digests at the ends of its full blocks; may lag behind until they are needed.
        check_at: ``total`` from which on the end must be checked after each token; until then no token can end it.
        scheduled_ns: When it first entered a batch; 0 before.
        announced: Whether an output reported ``scheduled_ns`` and the cached tokens.
        reported: ``total`` as far as outputs reported its tokens, where not every step reports them.
        counts_only: Whether tokens between first and last are only counted: ``extend`` does nothing else.
    """

    def __init__(
        self,
        source: EngineSequence,
        *,
        vocabulary: Vocabulary,
        table: list[int],
        lengths: OutputLengths,
        max_model_len: int,
        noise: int = 0,
    ) -> None:
        """Args: noise: of the engine, for sequences that are sampled without a seed."""
        sampling = source.sampling
        super().__init__(
            source.sequence,
            source.prompt_token_ids + source.output_token_ids,
            prompt_tokens=len(source.prompt_token_ids),
            max_tokens=sampling.max_tokens,
            arrival_ns=source.arrival_ns,
        )
        self.expected_output_tokens = source.expected_output_tokens
        self.logprobs = sampling.logprobs
        self.scheduled_ns = 0
        self.announced = False
        self.reported = self.total
        self.counts_only = False
        self._table = table
        self._key = stream_key(source.prompt_token_ids, sampling.seed)
        unseeded = sampling.seed is None and sampling.temperature > 0
        self._salt = noise if unseeded else seed_salt(sampling.seed)
        self.begin_on(ROOT, 0, [])
        self._stops = frozenset(sampling.stop_token_ids)
        self._stops_from = sampling.min_tokens
        self._eos_token_id = vocabulary.eos_token_id
        # Index of the output token that is EOS; past every limit where the client wants none.
        natural = max(lengths.length(self._key) - 1, sampling.min_tokens)
        self._eos_index = sampling.max_tokens if sampling.ignore_eos else natural
        self._total_limit = min(self.prompt_tokens + sampling.max_tokens, max_model_len)
        ends_at = min(self.prompt_tokens + self._eos_index + 1, self._total_limit)
        self.check_at = 0 if self._stops else ends_at

    def begin_on(self, digest: int, tokens: int, borders: list[int]) -> None:
        """It goes on behind KV of its first ``tokens``, which has this digest, and these at the ends of full blocks."""
        self.found, self.found_digest, self.borders = tokens, digest, borders
        self._digest, self._digested = digest, tokens

    def append(self, token_id: int) -> None:
        if self._digested == self.total:
            self._digest = crc32(token_id.to_bytes(WORD_BYTES, "little"), self._digest)
            self._digested += 1
        self.token_ids.append(token_id)
        self.total += 1

    def extend(self, steps: int) -> None:
        """Samples and appends so many tokens, none of which can end it or is a stop token."""
        table, salt, digest, token_ids = self._table, self._salt, self._digest_now(), self.token_ids
        for _ in range(steps):
            token = table[((digest ^ salt) * MIX >> 40) & 255]
            token_ids.append(token)
            digest = crc32(token.to_bytes(WORD_BYTES, "little"), digest)
        self.total += steps
        self._digest, self._digested = digest, self.total

    def _digest_now(self) -> int:
        """Digest of the KV of all its tokens: what it found, and what it computed behind that."""
        missing = self.total - self._digested
        if missing:
            self._digest = crc32(kv_words(self.token_ids[-missing:]), self._digest)
            self._digested = self.total
        return self._digest

    def unreported(self) -> list[int]:
        """Tokens that no output has reported; from now on they count as reported."""
        token_ids = self.token_ids[self.reported :]
        self.reported = self.total
        return token_ids

    def unreported_now(self) -> StepOutput:
        """The same as an output."""
        return StepOutput(sequence=self.sequence, token_ids=self.unreported(), preemptions=self.preemptions)

    def next_token(self) -> int:
        """The token at the current position. Does not append it."""
        index = self.total - self.prompt_tokens
        if index == self._eos_index:
            return self._eos_token_id
        digest = self._digest if self._digested == self.total else self._digest_now()
        token = self._table[((digest ^ self._salt) * MIX >> 40) & 255]  # tokens.next_token
        if index < self._stops_from and token in self._stops:
            return self._unstopping(token)
        return token

    def _unstopping(self, token: int) -> int:
        """A neighbour of ``token`` that is no stop token: min_tokens forbids those. The same token if all are."""
        allowed = [candidate for candidate in sorted(set(self._table)) if candidate not in self._stops]
        return allowed[token % len(allowed)] if allowed else token

    def ended(self, token: int) -> FinishReason | None:
        """Return the reason why the sequence ends with this token, just appended; None if it goes on."""
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
