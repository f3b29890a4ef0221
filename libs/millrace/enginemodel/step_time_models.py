"""Step-time models: what is fitted, stored and read by people. Each compiles into a StepCost, which is what runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Protocol

import msgspec

from millrace.contracts.status import BatchComposition
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_cost import FS_PER_NS, CostCurve, StepCost

#: The costs of a LinearStepTime that are single figures, ns.
COSTS = (
    "fixed",
    "per_decode",
    "per_prefill_token",
    "per_context_token",
    "per_prefill_work",
    "per_tail_token",
    "per_prompted_step",
    "per_mixed_decode",
    "per_mixed_context_token",
    "per_mixed_work",
)


class StepTimeModel(Protocol):
    """Says what a step costs on one kind of engine."""

    def cost(self, parameters: EngineParameters) -> StepCost:
        """Compiles the model for an engine of these limits."""
        ...


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Origin and reliability of coefficients.

    Attributes:
        error: The fit's error in words and figures.
    """

    model: str
    hardware: str
    source: str
    error: str


class LinearStepTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step's time as a sum of what it does, each with a cost in ns.

    ``T = fixed + per_decode·decodes + per_prefill_token·prefill_tokens + per_prefill_work·prefill_work +
    per_context_token·context_tokens + per_tail_token·(longest - mean context of decodes) + Σ bends``, the tail only
    where at least ``tail_decodes`` sequences decode. A step with any prompt token has ``per_prompted_step`` too, and
    ``per_mixed_decode·decodes + per_mixed_context_token·context of decodes + per_mixed_work·decodes·prefill_tokens``.

    Attributes:
        fixed: ns of any step (c0): launching, weights read once.
        per_decode: ns for each decoding sequence (c1).
        per_prefill_token: ns for each prompt token (c2).
        per_context_token: ns for each token of context that attention reads (c3).
        per_prefill_work: ns for each token² of prompt attention (c4).
        per_tail_token: ns for each token by which the longest decoding sequence is longer than their mean: what
            unequal lengths in one batch cost. 0 where that was not measured, or costs nothing.
        per_prompted_step: ns that a step costs more in which any prompt is computed, however short: the batch is put
            together anew, and attention takes another path.
        per_mixed_decode: ns for each decoding sequence beside prompt tokens.
        per_mixed_context_token: ns for each token of their context: kernels that take prompts and decodes at once read
            it slower.
        per_mixed_work: ns for each pair of a decoding sequence and a prompt token.
        tail_decodes: Decoding sequences from which on unequal lengths cost something: with fewer the kernel splits.
        bends: Pairs (tokens, ns), tokens rising: each token computed beyond so many, of prompts or decodes, costs so
            much more, or less where ns is below 0, down to what it costs without bends. This is how a roofline bends:
            weights are read once for few tokens and for many.
    """

    fixed: float
    per_decode: float = 0.0
    per_prefill_token: float = 0.0
    per_context_token: float = 0.0
    per_prefill_work: float = 0.0
    per_tail_token: float = 0.0
    per_prompted_step: float = 0.0
    per_mixed_decode: float = 0.0
    per_mixed_context_token: float = 0.0
    per_mixed_work: float = 0.0
    tail_decodes: int = 0
    bends: tuple[tuple[int, float], ...] = ()
    provenance: Provenance | None = None

    def __post_init__(self) -> None:
        if self.tail_decodes < 0:
            raise ValueError("tail_decodes must be at least 0")
        for name in COSTS:
            ns = getattr(self, name)
            if not 0 <= ns < float("inf"):
                raise ValueError(f"{name} must be a time of at least 0 ns, is {ns}")
        steepness = list(itertools.accumulate(ns for _, ns in self.bends))
        if not all(-1e-3 <= ns < float("inf") for ns in steepness):
            raise ValueError(f"bends must never sum up to less than 0 ns a token, sum up to {steepness}")
        starts = [0, *(tokens for tokens, _ in self.bends)]
        if any(later <= earlier for earlier, later in itertools.pairwise(starts)):
            raise ValueError(f"bends must begin at rising numbers of tokens, begin at {starts[1:]}")

    @classmethod
    def fitted(cls, costs: Iterable[float], *, bends: tuple[tuple[int, float], ...] = ()) -> LinearStepTime:
        """The model of a fit's solution.

        Args:
            costs: ns of fixed, per_decode, per_prefill_token, per_context_token, per_prefill_work, per_prompted_step,
                per_mixed_decode, per_mixed_context_token, per_mixed_work; the last three may be left out.
        """
        fixed, decode, prefill, context, work, prompted, *mixed = (float(ns) for ns in costs)
        mixed_decode, mixed_context, mixed_work = mixed or (0.0, 0.0, 0.0)
        return cls(
            fixed=fixed,
            per_decode=decode,
            per_prefill_token=prefill,
            per_context_token=context,
            per_prefill_work=work,
            per_prompted_step=prompted,
            per_mixed_decode=mixed_decode,
            per_mixed_context_token=mixed_context,
            per_mixed_work=mixed_work,
            bends=bends,
        )

    def cost(self, parameters: EngineParameters) -> StepCost:
        return StepCost(
            fixed=_fs(self.fixed),
            decode=_fs(self.per_decode),
            prefill_token=_fs(self.per_prefill_token),
            context_token=_fs(self.per_context_token),
            tail_token=_fs(self.per_tail_token),
            tail_decodes=self.tail_decodes,
            prefill_half_work=_fs(self.per_prefill_work / 2),
            mixed_decode=_fs(self.per_mixed_decode),
            mixed_context_token=_fs(self.per_mixed_context_token),
            mixed_work=_fs(self.per_mixed_work),
            tokens=_bent(self.bends) if self.bends else None,
            prefill_work=(_flat(self.per_prompted_step),) if self.per_prompted_step else (),
        )

    def times(self, factor: float) -> LinearStepTime:
        """The same on a machine that takes so many times as long."""
        costs = {name: getattr(self, name) * factor for name in COSTS}
        bends = tuple((tokens, ns * factor) for tokens, ns in self.bends)
        return msgspec.structs.replace(self, **costs, bends=bends)

    def duration_ns(self, batch: BatchComposition) -> int:
        """Time of one step, ns: for fits and for people."""
        return self.cost(EngineParameters()).duration_fs(batch) // FS_PER_NS


def _flat(ns: float) -> CostCurve:
    """The curve that costs the same everywhere: of prompt work, what any prompt costs."""
    return CostCurve(starts=(0,), values_fs=(_fs(ns),), slopes_fs=(0,))


def _bent(bends: tuple[tuple[int, float], ...]) -> CostCurve:
    """The curve that is flat at 0 and gets steeper at each bend."""
    starts, values, slopes = [0], [0], [0]
    for tokens, ns in bends:
        values.append(values[-1] + slopes[-1] * (tokens - starts[-1]))
        slopes.append(max(0, slopes[-1] + _fs(ns)))
        starts.append(tokens)
    return CostCurve(starts=tuple(starts), values_fs=tuple(values), slopes_fs=tuple(slopes))


def _fs(ns: float) -> int:
    return round(ns * FS_PER_NS)
