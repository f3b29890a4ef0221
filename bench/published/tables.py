"""Reads published kernel measurements into profiles. They stay in the data folder and are never committed.

Formats: Vidur's (one row per size, medians of each operator in ms), aiconfigurator's (one row per call, latency in ms)
and LLMServingSim's (us). Each reader takes a path and refuses, with file and column, what it cannot read.
"""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec

from bench.published.surface import MeasuredCurve, Surface

#: Operators of one layer in Vidur's linear profiles; embedding is once per step and next to nothing.
LAYER_OPERATORS = (
    "input_layernorm",
    "attn_pre_proj",
    "attn_rope",
    "attn_post_proj",
    "post_attention_layernorm",
    "mlp_up_proj",
    "mlp_act",
    "mlp_down_proj",
    "add",
)
MS = 1e6
US = 1e3
#: Bytes of a number in the tables' precision (float16 or bfloat16).
BYTES = 2


class Hardware(msgspec.Struct, frozen=True):
    """Peaks of a GPU: no measurement can be faster.

    Attributes:
        name: As in provenances.
        bytes_per_second: Of its memory.
        flops: Dense matrix products in 16 bits, per second.
    """

    name: str
    bytes_per_second: float
    flops: float

    def least_ns(self, *, weights: int, tokens: int) -> float:
        """The roofline of a matrix product with so many weights for so many tokens."""
        return max(BYTES * weights / self.bytes_per_second, 2.0 * weights * tokens / self.flops) * 1e9


A30 = Hardware("NVIDIA A30", 933e9, 165e12)
A100 = Hardware("NVIDIA A100 80 GB", 2039e9, 312e12)
H100 = Hardware("NVIDIA H100 SXM", 3350e9, 989e12)
H200 = Hardware("NVIDIA H200 SXM", 4800e9, 989e12)
RTX4090 = Hardware("NVIDIA RTX 4090", 1008e9, 165e12)


def vidur_linear(path: Path, hardware: Hardware, *, ways: int = 1) -> MeasuredCurve:
    """One layer's linear part by tokens, in one GPU of a tensor-parallel group of ``ways``.

    A matrix product that is faster than the hardware can be was not measured (the A30 tables have dozens of such rows
    between 200 and 512 tokens, with medians near 0): it is left out, and a straight line drawn over the gap.
    """
    found = [row for row in rows(path, "num_tokens", "num_tensor_parallel_workers") if _ways(row) == ways]
    if not found:
        raise ValueError(f"{path}: no rows with num_tensor_parallel_workers = {ways}")
    operators = [_operator(path, found, name, hardware) for name in LAYER_OPERATORS]
    sizes = sorted({int(row["num_tokens"]) for row in found})
    return MeasuredCurve(tuple(sizes), tuple(sum(each.at(size) for each in operators) for size in sizes))


def _operator(path: Path, found: list[dict[str, str]], name: str, hardware: Hardware) -> MeasuredCurve:
    """Believable medians of one operator."""
    points = {}
    for row in found:
        ns, tokens = float(row[f"time_stats.{name}.median"] or 0) * MS, int(row["num_tokens"])
        if ns > 0 and ns >= hardware.least_ns(weights=_weights(row, name), tokens=tokens):
            points[tokens] = ns
    if not points:
        raise ValueError(f"{path}: no believable time of {name}")
    return profile(points)


def _weights(row: dict[str, str], name: str) -> int:
    """Weights of an operator on one GPU; 0 for those that are no matrix product."""
    hidden, expanded = int(row["n_embd"]), int(row["n_expanded_embd"])
    heads, kv_heads = int(row["n_head"]), int(row["n_kv_head"])
    widths = {
        "attn_pre_proj": hidden * (heads + 2 * kv_heads) // heads,
        "attn_post_proj": hidden,
        "mlp_up_proj": expanded * 2,
        "mlp_down_proj": expanded,
    }
    return hidden * widths.get(name, 0) // _ways(row)


def _ways(row: dict[str, str]) -> int:
    return int(row["num_tensor_parallel_workers"])


def vidur_attention(path: Path) -> tuple[Surface, Surface]:
    """One layer's decode attention (sequences, context) and prompt attention (chunk, computed before)."""
    decode: dict[tuple[int, int], float] = {}
    prefill: dict[tuple[int, int], float] = {}
    for row in rows(path, "batch_size", "kv_cache_size", "prefill_chunk_size", "is_prefill"):
        before = int(row["kv_cache_size"])
        if row["is_prefill"] == "True":
            prefill[int(row["prefill_chunk_size"]), before] = float(row["time_stats.attn_prefill.median"]) * MS
        else:
            decode[int(row["batch_size"]), before] = float(row["time_stats.attn_decode.median"]) * MS
    return surface(decode), surface(prefill)


def rows(path: Path, *columns: str) -> Iterator[dict[str, str]]:
    """Rows of a CSV file that has these columns."""
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            missing = [column for column in columns if column not in (reader.fieldnames or ())]
            if missing:
                raise ValueError(f"{path}: no column {', '.join(missing)}")
            yield from reader
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error


def surface(points: dict[tuple[int, int], float]) -> Surface:
    """A surface through scattered points."""
    found: dict[int, dict[int, float]] = defaultdict(dict)
    for (row, size), ns in points.items():
        found[row][size] = ns
    return Surface(tuple(sorted(found)), tuple(profile(found[row]) for row in sorted(found)))


def profile(points: dict[int, float]) -> MeasuredCurve:
    """A profile through points."""
    return MeasuredCurve(tuple(sorted(points)), tuple(points[size] for size in sorted(points)))


def averaged(samples: list[tuple[int, float]]) -> MeasuredCurve:
    """A profile through repeated samples: their medians."""
    found: dict[int, list[float]] = defaultdict(list)
    for size, ns in samples:
        found[size].append(ns)
    return profile({size: statistics.median(times) for size, times in found.items()})
