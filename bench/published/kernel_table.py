"""A step-time model from measured kernel tables: what each part of a layer takes, by the size that decides it.

Pure: the tables are read by bench.published.tables. All times in ns.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_cost import FS_PER_NS, CostCurve, StepCost
from millrace.enginemodel.step_time_models import Provenance

from bench.published.surface import MeasuredCurve, Surface

#: Prompt tokens per curve of prompt attention: fine enough, and 2,048 tokens make 32 curves.
PREFILL_GRANULARITY = 64


class KernelTableStepTime(msgspec.Struct, frozen=True, kw_only=True):
    """A step's time put together from kernels.

    ``T = layers·(linear(tokens) + prefill attention + decode attention + tail + mixed + 2·all-reduce(tokens)) +
    head(sequences) + host``.

    Attributes:
        layers: Of the model.
        linear: One layer's projections, norms and activations, by tokens computed in the step.
        decode: One layer's decode attention, by sequences and context tokens of each.
        prefill: One layer's prompt attention, by tokens of the chunk and tokens computed before.
        head: The language model's head and sampling, by sequences.
        host_fixed: What each step takes outside kernels, ns.
        host_per_sequence: The same for each sequence, ns.
        tail_token: One layer's cost of each token by which the longest decoding sequence is longer than their mean, ns;
            0 where unequal lengths cost nothing.
        tail_decodes: Decoding sequences from which on it is paid.
        mixed: What one layer's attention takes more than its prompt and decode attention apart when both are in a step,
            by sequences and context tokens of each; None where that was not measured.
        mixed_work: The same for each pair of a decoding sequence and a prompt token, ns.
        all_reduce: Between the GPUs of a tensor-parallel group, by its bytes; None on one GPU. The tables are those of
            one GPU of the group.
        hidden_bytes: Of one token's hidden state: what an all-reduce carries.
    """

    layers: int
    linear: MeasuredCurve
    decode: Surface
    prefill: Surface
    head: MeasuredCurve | None = None
    host_fixed: float = 0.0
    host_per_sequence: float = 0.0
    tail_token: float = 0.0
    tail_decodes: int = 0
    mixed: Surface | None = None
    mixed_work: float = 0.0
    all_reduce: MeasuredCurve | None = None
    hidden_bytes: int = 0
    provenance: Provenance | None = None

    def cost(self, parameters: EngineParameters) -> StepCost:
        """Curves for every number of tokens, sequences and decodes that an engine of these limits can have."""
        chunks = range(PREFILL_GRANULARITY, parameters.token_budget + PREFILL_GRANULARITY, PREFILL_GRANULARITY)
        return StepCost(
            fixed=_fs(self.host_fixed),
            tail_token=_fs(self.tail_token * self.layers),
            tail_decodes=self.tail_decodes,
            mixed_work=_fs(self.mixed_work * self.layers),
            tokens=self._tokens(parameters.token_budget),
            sequences=self._sequences(parameters.max_sequences),
            decode_context=self._by_decodes(self.decode, parameters.max_sequences),
            mixed_context=self._by_decodes(self.mixed, parameters.max_sequences) if self.mixed else (),
            prefill_work=tuple(self._chunk(tokens) for tokens in chunks),
            prefill_granularity=PREFILL_GRANULARITY,
        )

    def _tokens(self, budget: int) -> CostCurve:
        """Linear layers and all-reduces. A step of 0 tokens has none."""
        sizes = [size for size in self.linear.sizes if 0 < size <= max(budget, self.linear.sizes[0])]
        if self.all_reduce is not None:
            knots = (size // self.hidden_bytes for size in self.all_reduce.sizes)
            sizes += [tokens for tokens in knots if 0 < tokens <= budget]
        return _curve({0: 0.0} | {size: self._layers_at(size) for size in sizes}, beyond=self._layers_at)

    def _layers_at(self, tokens: float) -> float:
        reduced = 0.0 if self.all_reduce is None else 2 * self.all_reduce.at(tokens * self.hidden_bytes)
        return self.layers * (self.linear.at(tokens) + reduced)

    def _sequences(self, most: int) -> CostCurve:
        """The head and the host's work for each sequence."""
        sizes = [1, *(size for size in (self.head.sizes if self.head else ()) if 1 < size <= most)]
        return _curve({0: 0.0} | {size: self._sequences_at(size) for size in sizes}, beyond=self._sequences_at)

    def _sequences_at(self, sequences: float) -> float:
        return (self.head.at(sequences) if self.head else 0.0) + self.host_per_sequence * sequences

    def _by_decodes(self, attention: Surface, most: int) -> tuple[CostCurve, ...]:
        """A curve for each number of sequences, by the sum of their contexts."""
        return tuple(self._context(attention, count) for count in range(1, most + 1))

    def _context(self, attention: Surface, count: int) -> CostCurve:
        def at(total: float) -> float:
            return self.layers * attention.at(count, total / count)

        sizes = {count * size for size in attention.sizes() if size > 0}
        return _curve({0: at(0)} | {size: at(size) for size in sizes}, beyond=at)

    def _chunk(self, tokens: int) -> CostCurve:
        """Prompt attention of so many prompt tokens by doubled work ``chunk·(2·before + chunk)``.

        Less work than one fresh prompt of so many tokens has is that of several shorter ones: a line down to what the
        shortest prompt takes.
        """

        def at(half_work: float) -> float:
            return self.layers * self.prefill.at(tokens, max(0.0, (half_work / tokens - tokens) / 2))

        floor = self.layers * self.prefill.at(self.prefill.rows[0], 0)
        knots = {tokens * (2 * before + tokens): 0.0 for before in self.prefill.sizes()}
        points = {work: at(work) for work in knots}
        return _curve({0: min(floor, *points.values())} | points, beyond=at)


def _curve(points: dict[int, float], *, beyond: Callable[[float], float]) -> CostCurve:
    """Straight lines through points (ns); the last piece has the slope that ``beyond`` has there."""
    starts = sorted(points)
    values = [_fs(points[start]) for start in starts]
    far = 2 * starts[-1] + 1
    ends = [*starts[1:], far]
    totals = [*values[1:], _fs(beyond(far))]
    slopes = [
        max(0, (total - value) // (end - start))
        for start, end, value, total in zip(starts, ends, values, totals, strict=True)
    ]
    return CostCurve(starts=tuple(starts), values_fs=tuple(values), slopes_fs=tuple(slopes))


def _fs(ns: float) -> int:
    return round(ns * FS_PER_NS)
