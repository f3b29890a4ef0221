"""Reads LLMServingSim's profiles: dense layers, work per sequence, attention and unequal lengths; times in us, one
layer.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from millrace.enginemodel.measured import Profile, Surface
from millrace.profiling.tables import US, profile, rows, surface

#: How often each dense layer runs within one transformer layer.
DENSE = {
    "qkv_proj": 1,
    "o_proj": 1,
    "gate_up_proj": 1,
    "down_proj": 1,
    "act_fn": 1,
    "rotary_emb": 1,
    "layernorm": 2,
}


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


def linear(path: Path) -> Profile:
    """One layer's dense part by tokens."""
    points: dict[int, float] = {}
    for row in rows(path, "layer", "tokens", "time_us"):
        tokens = int(row["tokens"])
        points[tokens] = points.get(tokens, 0.0) + DENSE.get(row["layer"], 0) * float(row["time_us"]) * US
    return profile(points)


def head(path: Path) -> Profile:
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
