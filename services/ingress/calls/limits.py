"""Admission limits: token buckets and concurrency per API key, bounds over all. Pure; time is passed in.

Requests and tokens per minute are buckets that hold one minute's worth and refill evenly. A call pays one request
and its prompt tokens on arrival and its output tokens when it ends, so the token bucket may go below zero; the
next call then waits until it is refilled. A prompt larger than the whole bucket is admitted when the bucket
is full: otherwise it could never be.
"""

from __future__ import annotations

import msgspec

from services.ingress.calls.messages import Call, KeyLimits, RefusalKind
from services.ingress.config import LimitsConfig

_MINUTE_NS = 60_000_000_000
#: Keys whose buckets are remembered. Key files hold far fewer; beyond it idle full buckets are forgotten.
KEYS_MAX = 10_000
#: What a client without a better hint is told to wait when the whole service is full, or cut off, seconds.
RETRY_WHEN_FULL_S = 1.0
#: Sequences of all calls together, as a multiple of the calls.
SEQUENCES_PER_CALL = 2
#: Prompt tokens of all calls together, likewise: 33 million. Beyond it no call is taken, however short; the last one
#: may go beyond it, so that the longest prompt is taken once others have ended.
TOKENS_PER_CALL = 4_096


class Refusal(msgspec.Struct, frozen=True):
    """Reason for refusing a call."""

    kind: RefusalKind
    detail: str
    param: str = ""
    retry_after_s: float = 0.0


class TokenBucket:
    """A token bucket that holds one minute's worth and may be overdrawn."""

    __slots__ = ("_at_ns", "_level", "per_minute")

    def __init__(self, per_minute: int, now_ns: int) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_ns = now_ns

    def wait_ns(self, amount: int, now_ns: int) -> int:
        """Time until ``amount`` (at most the whole bucket) is there; 0 if it is."""
        self._refill(now_ns)
        missing = min(amount, self.per_minute) - self._level
        return 0 if missing <= 0 else int(missing * _MINUTE_NS / self.per_minute) + 1

    def take(self, amount: int, now_ns: int) -> None:
        """Take ``amount``, below zero if need be. Nothing is owed where there is no limit."""
        if self.per_minute:
            self._refill(now_ns)
            self._level -= amount

    def resize(self, per_minute: int) -> None:
        """The limit was changed: what was used of the old one stays used."""
        self._level += per_minute - self.per_minute
        self.per_minute = per_minute

    def full(self, now_ns: int) -> bool:
        """Whether forgetting it would change nothing."""
        self._refill(now_ns)
        return self._level >= self.per_minute

    def _refill(self, now_ns: int) -> None:
        if now_ns > self._at_ns:
            self._level = min(
                float(self.per_minute), self._level + (now_ns - self._at_ns) * self.per_minute / _MINUTE_NS
            )
            self._at_ns = now_ns


class KeyUse:
    """Present use of one API key."""

    __slots__ = ("calls_open", "requests", "tokens")

    def __init__(self, limits: KeyLimits, now_ns: int) -> None:
        self.calls_open = 0
        self.requests = TokenBucket(limits.requests_per_minute, now_ns)
        self.tokens = TokenBucket(limits.tokens_per_minute, now_ns)


class AdmissionLimits:
    """All counts of what is open. ``admit`` and ``release`` come in pairs."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self._keys: dict[str, KeyUse] = {}
        self.calls_open = 0
        self.sequences_open = 0
        self.prompt_tokens_open = 0

    def admit(self, call: Call, sequences: int, prompt_tokens: int, now_ns: int) -> Refusal | None:
        """Admit and count a call, or return why not (then nothing is counted)."""
        if self.calls_open >= self._limits.calls_open_max:
            return _full(f"{self.calls_open} requests are open, the most this server takes")
        if self.sequences_open + sequences > SEQUENCES_PER_CALL * self._limits.calls_open_max:
            return _full(f"{self.sequences_open} choices are open and this request asks for {sequences} more")
        if self.prompt_tokens_open >= TOKENS_PER_CALL * self._limits.calls_open_max:
            return _full(f"prompts of {self.prompt_tokens_open} tokens are open, the most this server takes")
        if call.key:
            use = self._use(call, now_ns)
            refusal = _over_limits(call.limits, use, prompt_tokens, now_ns)
            if refusal is not None:
                return refusal
            use.calls_open += 1
            use.requests.take(1, now_ns)
            use.tokens.take(prompt_tokens, now_ns)
        self.calls_open += 1
        self.sequences_open += sequences
        self.prompt_tokens_open += prompt_tokens
        return None

    def release(self, call: Call, sequences: int, output_tokens: int, now_ns: int) -> None:
        self.calls_open -= 1
        self.sequences_open -= sequences
        self.prompt_tokens_open -= sum(map(len, call.prompts))
        if call.key:
            use = self._use(call, now_ns)
            use.calls_open -= 1
            use.tokens.take(output_tokens, now_ns)

    def _use(self, call: Call, now_ns: int) -> KeyUse:
        use = self._keys.get(call.key)
        if use is None:
            if len(self._keys) >= KEYS_MAX:
                self._forget_idle(now_ns)
            use = self._keys[call.key] = KeyUse(call.limits, now_ns)
        limits = call.limits
        if use.requests.per_minute != limits.requests_per_minute:
            use.requests.resize(limits.requests_per_minute)
        if use.tokens.per_minute != limits.tokens_per_minute:
            use.tokens.resize(limits.tokens_per_minute)
        return use

    def _forget_idle(self, now_ns: int) -> None:
        for key in [
            k for k, u in self._keys.items() if not u.calls_open and u.requests.full(now_ns) and u.tokens.full(now_ns)
        ]:
            del self._keys[key]


def _over_limits(limits: KeyLimits, use: KeyUse, prompt_tokens: int, now_ns: int) -> Refusal | None:
    if limits.concurrency and use.calls_open >= limits.concurrency:
        return Refusal(
            RefusalKind.CONCURRENCY, f"this key has {use.calls_open} requests open, its limit is {limits.concurrency}"
        )
    if limits.requests_per_minute:
        wait_ns = use.requests.wait_ns(1, now_ns)
        if wait_ns:
            return _rate(f"{limits.requests_per_minute} requests per minute", wait_ns)
    if limits.tokens_per_minute:
        wait_ns = use.tokens.wait_ns(prompt_tokens, now_ns)
        if wait_ns:
            return _rate(f"{limits.tokens_per_minute} tokens per minute", wait_ns)
    return None


def _rate(limit: str, wait_ns: int) -> Refusal:
    return Refusal(
        RefusalKind.RATE_LIMITED, f"this key is limited to {limit}", retry_after_s=round(wait_ns / 1e9 + 0.0005, 3)
    )


def _full(detail: str) -> Refusal:
    return Refusal(RefusalKind.QUEUE_FULL, detail, retry_after_s=RETRY_WHEN_FULL_S)
