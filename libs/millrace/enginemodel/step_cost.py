"""Cost of a step, in integers: the one form into which every step-time model is compiled.

Integers make sums exact. A run of equal-membership decode steps costs the same whether it is added step by step or in
closed form, in Python or in C++ (native/enginemodel), so forecasts can be held to exact agreement. The unit is the
femtosecond: fine enough for one token of context on a large GPU, and a signed 64-bit integer still holds two hours.
"""

from __future__ import annotations

from bisect import bisect_right

import msgspec

from millrace.contracts.status import BatchComposition

#: Femtoseconds per nanosecond.
FS_PER_NS = 1_000_000


class CostCurve(msgspec.Struct, frozen=True):
    """A piecewise-linear cost over one integer quantity.

    Attributes:
        starts: Where each piece begins, rising, the first 0.
        values_fs: Cost at the start of each piece, fs.
        slopes_fs: Cost of each further unit within the piece, fs; the last piece has no end.
    """

    starts: tuple[int, ...]
    values_fs: tuple[int, ...]
    slopes_fs: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raises ValueError for pieces that do not fit together."""
        same = len(self.starts) == len(self.values_fs) == len(self.slopes_fs)
        rising = all(a < b for a, b in zip(self.starts, self.starts[1:], strict=False))
        if not same or not self.starts or self.starts[0] != 0 or not rising:
            raise ValueError("a cost curve needs equally many starts (rising from 0), values and slopes")

    def at(self, quantity: int) -> int:
        """Cost at ``quantity`` >= 0, fs."""
        piece = bisect_right(self.starts, quantity) - 1
        return self.values_fs[piece] + self.slopes_fs[piece] * (quantity - self.starts[piece])


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of one step as a function of its BatchComposition, all in fs.

    ``fixed + decode·decodes + prefill_token·prefill_tokens + prefill_half_work·2·prefill_work + tokens(decodes +
    prefill_tokens) + sequences(decodes + prefills) + prefill(prefill_tokens, 2·prefill_work) +
    context_token·context_tokens + decode_context(decodes, context of decodes) + tail + mixed``.

    ``tail = tail_token·(longest_context - mean context of decodes)``, rounded down, where at least ``tail_decodes``
    sequences decode and the longest context is known: as both grow by one token a step, it is constant in a run of
    decode steps. ``mixed = mixed_decode·decodes + mixed_context_token·context of decodes + mixed_work·decodes·
    prefill_tokens + mixed_context(decodes, context of decodes)`` where a step has decodes and prompt tokens.

    Attributes:
        fixed: Any step.
        decode: Each decoding sequence.
        prefill_token: Each prompt token.
        context_token: Each token of context, over all sequences.
        tail_token: Each token by which the longest decoding sequence is longer than the mean of those that decode; 0
            where unequal lengths cost nothing.
        tail_decodes: With fewer decoding sequences it costs nothing: kernels split long contexts then.
        prefill_half_work: Each half token² of prompt attention.
        mixed_decode: Each decoding sequence beside prompt tokens.
        mixed_context_token: Each token of context of decodes beside prompt tokens.
        mixed_work: Each pair of a decoding sequence and a prompt token.
        tokens: By tokens computed in the step; None for none, as for all curves.
        sequences: By sequences in the step (each may sample: the language model's head).
        decode_context: By context of the decodes; one curve for 1, 2, 3, … decodes, the last one for more.
        prefill_work: By doubled prefill work; one curve for each ``prefill_granularity`` of prompt tokens, rounded up.
        mixed_context: Beside prompt tokens, by context of the decodes; curves as of ``decode_context``.
        prefill_granularity: Prompt tokens per curve.
    """

    fixed: int
    decode: int = 0
    prefill_token: int = 0
    context_token: int = 0
    tail_token: int = 0
    tail_decodes: int = 0
    prefill_half_work: int = 0
    mixed_decode: int = 0
    mixed_context_token: int = 0
    mixed_work: int = 0
    tokens: CostCurve | None = None
    sequences: CostCurve | None = None
    decode_context: tuple[CostCurve, ...] = ()
    prefill_work: tuple[CostCurve, ...] = ()
    mixed_context: tuple[CostCurve, ...] = ()
    prefill_granularity: int = 64

    def duration_fs(self, batch: BatchComposition) -> int:
        """Cost of a step, at least 1 ns."""
        decodes, prefill_tokens = batch.decodes, batch.prefill_tokens
        half_work = round(2 * batch.prefill_work)
        cost = self.fixed + self.decode * decodes + self.prefill_token * prefill_tokens
        cost += self.prefill_half_work * half_work
        if self.tokens is not None:
            cost += self.tokens.at(decodes + prefill_tokens)
        if self.sequences is not None:
            cost += self.sequences.at(decodes + batch.prefills)
        cost += self.context_token * batch.context_tokens
        context = batch.context_tokens - batch.prefill_context_tokens
        if decodes:
            if self.decode_context:
                cost += _for_count(self.decode_context, decodes).at(context)
            cost += self._tail(decodes, context, batch.longest_context)
        if prefill_tokens:
            if self.prefill_work:
                cost += _for_count(self.prefill_work, -(-prefill_tokens // self.prefill_granularity)).at(half_work)
            if decodes:
                cost += self._mixed(decodes, context, prefill_tokens)
        return max(FS_PER_NS, cost)

    def _tail(self, decodes: int, context: int, longest: int) -> int:
        if not self.tail_token or decodes < self.tail_decodes:
            return 0
        return max(0, longest * decodes - context) * self.tail_token // decodes

    def _mixed(self, decodes: int, context: int, prefill_tokens: int) -> int:
        cost = self.mixed_decode * decodes + self.mixed_context_token * context
        cost += self.mixed_work * decodes * prefill_tokens
        return cost + (_for_count(self.mixed_context, decodes).at(context) if self.mixed_context else 0)

    def decode_run_fs(self, batch: BatchComposition, steps: int) -> int:
        """Cost of ``steps`` successive steps of a pure decode batch whose first one is ``batch``, fs.

        Each step, every sequence's context grows by one token.
        """
        assert batch.prefills == 0, "only decodes run on unchanged"
        return sum(self.duration_fs(after(batch, step)) for step in range(steps))


def _for_count(curves: tuple[CostCurve, ...], count: int) -> CostCurve:
    """The curve of ``count``, from 1 on; the last one for more."""
    return curves[min(count, len(curves)) - 1]


def after(batch: BatchComposition, steps: int) -> BatchComposition:
    """A pure decode batch, so many steps later."""
    return BatchComposition(
        decodes=batch.decodes,
        context_tokens=batch.context_tokens + steps * batch.decodes,
        longest_context=batch.longest_context + steps if batch.longest_context else 0,
    )
