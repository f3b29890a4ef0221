"""Times of an instance's steps as curves: decode steps by their sequences, prompts by length and by who decodes beside.

Costs bend with the tokens of a step: the same chunk takes more beside many decoding sequences, and a long one more per
token than a short one. A straight line through both understates what prompts cost beside decodes by a quarter.
"""

from __future__ import annotations

from typing import Self

import msgspec
import numpy as np

from millrace.contracts.status import BatchComposition
from millrace.enginemodel.step_cost import FS_PER_NS, StepCost
from millrace.policies.stages.statistics import Array

#: Batch sizes at which steps are sampled.
DECODES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 512, 768, 1024)

#: Batches beside which prompts are sampled.
BESIDE = (1, 16, 32, 64, 96, 128, 192, 256, 512, 1024)

#: Lengths of sampled prompts, tokens.
PROMPTS = tuple(round(16 * 2 ** (k / 2)) for k in range(27))

#: Context of each decoding sequence in a sample, tokens.
CONTEXT = 1024


class StepCurves(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled step times; between samples and beyond them lines.

    Attributes:
        decodes: (K) numbers of decoding sequences, rising, at least two.
        step_s: (K) seconds of such a step, the reading of context left out.
        beside: (M) numbers of decoding sequences, rising, at least two.
        prompts: (P) prompt lengths, tokens, rising, at least two.
        token_s: (M, P) seconds per prompt token that a prompt adds to steps of so many decoding sequences, the work of
            its attention included.
    """

    decodes: tuple[float, ...]
    step_s: tuple[float, ...]
    beside: tuple[float, ...]
    prompts: tuple[float, ...]
    token_s: tuple[tuple[float, ...], ...]

    @classmethod
    def straight(cls, *, fixed_s: float, decode_s: float, token_s: float, work_s: float) -> Self:
        """Curves of an instance whose costs are lines.

        Args:
            work_s: Of each squared token of prompt attention.
        """
        row = (token_s, token_s + work_s / 2)
        return cls(
            decodes=(0.0, 1.0),
            step_s=(fixed_s, fixed_s + decode_s),
            beside=(0.0, 1.0),
            prompts=(0.0, 1.0),
            token_s=(row, row),
        )

    def step(self, decodes: Array) -> Array:
        """Seconds of steps with so many decoding sequences, context left out; any shape."""
        return _on_lines(decodes, np.asarray(self.decodes), np.asarray(self.step_s))

    def prompt(self, decodes: float, lengths: Array) -> Array:
        """Seconds per prompt token of prompts of these lengths beside so many decoding sequences."""
        table, beside = np.asarray(self.token_s), np.asarray(self.beside)
        above = int(np.clip(np.searchsorted(beside, decodes), 1, len(beside) - 1))
        share = min(1.0, max(0.0, (decodes - beside[above - 1]) / (beside[above] - beside[above - 1])))
        row = (1 - share) * table[above - 1] + share * table[above]
        return _on_lines(lengths, np.asarray(self.prompts), row)


def sampled(cost: StepCost, *, per_context_token_s: float, token_budget: int) -> StepCurves:
    """Samples a step cost.

    Args:
        per_context_token_s: Taken off decode steps, which are sampled at 1,024 tokens of context each.
        token_budget: Tokens of one step at most; decoding sequences take their part of it before prompts.
    """
    steps = [_decode_s(cost, decodes) - per_context_token_s * decodes * CONTEXT for decodes in DECODES]
    beside = _beside(token_budget)
    return StepCurves(
        decodes=tuple(map(float, DECODES)),
        step_s=tuple(steps),
        beside=tuple(map(float, beside)),
        prompts=tuple(map(float, PROMPTS)),
        token_s=tuple(_prompt_tokens_s(cost, decodes, max(1, token_budget - decodes)) for decodes in beside),
    )


def _beside(token_budget: int) -> tuple[int, ...]:
    """Batches that leave prompts a part of the budget; the largest leaves an eighth where a larger sample does not."""
    most = max(2, token_budget - max(1, token_budget // 8))
    return BESIDE if most >= BESIDE[-1] else (*(decodes for decodes in BESIDE if decodes < most), most)


def _prompt_tokens_s(cost: StepCost, decodes: int, chunk_max: int) -> tuple[float, ...]:
    """Seconds per token that prompts of the sampled lengths add to the steps that compute them, chunk by chunk.

    All begin with the same full chunks, which are computed once.
    """
    alone, found, done, rates = _decode_s(cost, decodes), 0.0, 0, []
    for tokens in PROMPTS:
        while done + chunk_max <= tokens:
            found += _chunk_s(cost, decodes, done, chunk_max) - alone
            done += chunk_max
        rest = tokens - done
        rates.append((found + (_chunk_s(cost, decodes, done, rest) - alone if rest else 0.0)) / tokens)
    return tuple(rates)


def _chunk_s(cost: StepCost, decodes: int, done: int, chunk: int) -> float:
    """Seconds of a step with a prompt's chunk after so many computed tokens."""
    batch = BatchComposition(
        decodes=decodes,
        prefills=1,
        prefill_tokens=chunk,
        context_tokens=decodes * CONTEXT + done + chunk,
        prefill_work=chunk * (done + chunk / 2),
        prefill_context_tokens=done + chunk,
        longest_context=CONTEXT,
    )
    return cost.duration_fs(batch) / FS_PER_NS / 1e9


def _decode_s(cost: StepCost, decodes: int) -> float:
    batch = BatchComposition(decodes=decodes, context_tokens=decodes * CONTEXT, longest_context=CONTEXT)
    return cost.duration_fs(batch) / FS_PER_NS / 1e9


def _on_lines(at: Array, x: Array, y: Array) -> Array:
    """Values on the lines between points, and on the outer ones beyond them."""
    right = np.clip(np.searchsorted(x, at), 1, len(x) - 1)
    slope = (y[right] - y[right - 1]) / (x[right] - x[right - 1])
    found: Array = y[right - 1] + slope * (at - x[right - 1])
    return found
