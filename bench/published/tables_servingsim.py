"""Reads LLMServingSim's profiles: dense layers, work per sequence, attention and unequal lengths; times in us, one
layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from scipy.optimize import nnls

from bench.published.surface import MeasuredCurve, Surface
from bench.published.tables import US, profile, rows, surface

#: How often each dense layer runs within one transformer layer.
DENSE = {"qkv_proj": 1, "o_proj": 1, "gate_up_proj": 1, "down_proj": 1, "act_fn": 1, "rotary_emb": 1, "layernorm": 2}


class Skew(msgspec.Struct, frozen=True, kw_only=True):
    """A decode batch of unequal lengths, and what its attention took in one layer.

    Attributes:
        sequences: Of the batch.
        long: Those with ``longest`` tokens of context; the others have ``shortest``.
        even_ns: A batch of equal lengths with the same sum of contexts.
        ns: This batch.
    """

    sequences: int
    long: int
    longest: int
    shortest: int
    even_ns: float
    ns: float

    @property
    def context_tokens(self) -> int:
        """Sum of contexts."""
        return self.long * self.longest + (self.sequences - self.long) * self.shortest


class MixedAttention(msgspec.Struct, frozen=True, kw_only=True):
    """One layer's attention of a prompt chunk and decodes at once.

    Attributes:
        chunk: Prompt tokens.
        before: Of the same prompt, computed before.
        sequences: That decode.
        context: Of each of them, tokens.
        ns: All of it.
    """

    chunk: int
    before: int
    sequences: int
    context: int
    ns: float

    @property
    def context_tokens(self) -> int:
        """KV that the step reads, tokens."""
        return self.chunk + self.before + self.sequences * self.context


def linear(path: Path) -> MeasuredCurve:
    """One layer's dense part by tokens."""
    points: dict[int, float] = {}
    for row in rows(path, "layer", "tokens", "time_us"):
        tokens = int(row["tokens"])
        points[tokens] = points.get(tokens, 0.0) + DENSE.get(row["layer"], 0) * float(row["time_us"]) * US
    return profile(points)


def head(path: Path) -> MeasuredCurve:
    """The language model's head and the sampler by sequences."""
    points: dict[int, float] = {}
    for row in rows(path, "layer", "sequences", "time_us"):
        sequences = int(row["sequences"])
        points[sequences] = points.get(sequences, 0.0) + float(row["time_us"]) * US
    return profile(points)


def attention(path: Path) -> tuple[Surface, Surface]:
    """One layer's decode attention (sequences, context) and prompt attention (chunk, computed before)."""
    decode: dict[tuple[int, int], float] = {}
    prefill: dict[tuple[int, int], float] = {}
    for row in rows(path, "prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"):
        chunk, sequences, ns = int(row["prefill_chunk"]), int(row["n_decode"]), float(row["time_us"]) * US
        if not chunk:
            decode[sequences, int(row["kv_decode"])] = ns
        elif not sequences:
            prefill[chunk, int(row["kv_prefill"])] = ns
    return surface(decode), surface(prefill)


def mixed_attention(path: Path, *, kv_tokens: int) -> tuple[Surface, float]:
    """Return the extra attention time of one layer for a prompt chunk and decodes in one step instead of apart.

    The fit minimises the squares of relative errors with costs of at least 0. It has a value for each measured
    (sequences, context), and a cost of each pair of a decoding sequence and a prompt token. A step that is faster
    together than apart (few decodes of short contexts, where a launch is saved) counts as equal.

    Args:
        kv_tokens: Rows with more context than so much are left out: no engine on that GPU has room for them.

    Returns: ns by sequences and context tokens of each; ns of each pair.
    """
    decode, prefill = attention(path)
    found = [row for row in _mixed_rows(path) if row.context_tokens <= kv_tokens]
    keys = sorted({(row.sequences, row.context) for row in found})
    columns = {key: index for index, key in enumerate(keys)}
    matrix = np.zeros((len(found), len(keys) + 1))
    excess = np.zeros(len(found))
    for index, row in enumerate(found):
        matrix[index, columns[row.sequences, row.context]] = 1 / row.ns
        matrix[index, -1] = row.sequences * row.chunk / row.ns
        apart = decode.at(row.sequences, row.context) + prefill.at(row.chunk, row.before)
        excess[index] = 1 - apart / row.ns
    scale = np.abs(matrix).max(axis=0)
    *values, pair = nnls(matrix / scale, excess)[0] / scale
    return surface(dict(zip(keys, map(float, values), strict=True))), float(pair)


def _mixed_rows(path: Path) -> Iterator[MixedAttention]:
    for row in rows(path, "prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"):
        if int(row["prefill_chunk"]) and int(row["n_decode"]):
            yield MixedAttention(
                chunk=int(row["prefill_chunk"]),
                before=int(row["kv_prefill"]),
                sequences=int(row["n_decode"]),
                context=int(row["kv_decode"]),
                ns=float(row["time_us"]) * US,
            )


def skews(path: Path) -> list[Skew]:
    """Decode batches of unequal lengths without prompt chunks."""
    return [
        Skew(
            sequences=int(row["n"]),
            long=int(row["nb"]),
            longest=int(row["kv_big"]),
            shortest=int(row["kvs"]),
            even_ns=float(row["t_mean_us"]) * US,
            ns=float(row["t_skew_us"]) * US,
        )
        for row in rows(path, "regime", "n", "nb", "kvs", "kv_big", "t_mean_us", "t_skew_us")
        if row["regime"] == "pure"
    ]
