"""Reads aiconfigurator's kernel tables: matrix products, attention, all-reduces; latency in ms, one call a row."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import msgspec

from bench.published.surface import MeasuredCurve, Surface
from bench.published.tables import MS, US, averaged, profile, rows, surface

#: Tokens computed before a chunk for which prompt attention is worked out; the tables have fresh prompts only.
BEFORE = (0, 256, 1024, 4096, 16_384)
#: Above so many times the time of a larger size, a time was disturbed.
DISTURBED = 7 / 6


class Files(msgspec.Struct, frozen=True):
    """The tables of one GPU under one vLLM, e.g. ``h100_sxm_vllm0.14.0``."""

    folder: Path
    stem: str

    def path(self, table: str) -> Path:
        """File of one table."""
        return self.folder / f"{self.stem}_{table}.csv"


class Heads(msgspec.Struct, frozen=True):
    """Attention heads on one GPU."""

    query: int
    key_value: int


def matrix_product(files: Files, *, outputs: int, inputs: int) -> MeasuredCurve:
    """A matrix product by tokens. Sizes that were not measured lie on straight lines between those that were.

    Times longer than those of more tokens are left out: on an H100, 8192 x 5120 took 988 us for 2,048 tokens and 409
    for 4,096. A sixth of slack keeps the scatter of small sizes, where the weights decide.
    """
    samples: dict[tuple[int, int], list[tuple[int, float]]] = defaultdict(list)
    for row in rows(files.path("gemm"), "m", "n", "k", "latency"):
        samples[int(row["n"]), int(row["k"])].append((int(row["m"]), float(row["latency"]) * MS))
    if any(k == inputs for _, k in samples):
        return across({n: _undisturbed(averaged(found)) for (n, k), found in samples.items() if k == inputs}, outputs)
    return across({k: _undisturbed(averaged(found)) for (n, k), found in samples.items() if n == outputs}, inputs)


def _undisturbed(measured: MeasuredCurve) -> MeasuredCurve:
    """Without times that are clearly longer than one of a larger size."""
    kept, least = {}, float("inf")
    for size, ns in reversed(list(zip(measured.sizes, measured.ns, strict=True))):
        if ns <= DISTURBED * least:
            kept[size] = ns
            least = min(least, ns)
    return profile(kept)


def across(found: dict[int, MeasuredCurve], size: int) -> MeasuredCurve:
    """The profile at a size between profiles measured at others.

    Raises:
        ValueError: there are none.
    """
    if size in found:
        return found[size]
    if len(found) < 2:
        raise ValueError(f"no matrix product near size {size}")
    ranked = sorted(found)
    least, most = max(each.sizes[0] for each in found.values()), min(each.sizes[-1] for each in found.values())
    tokens = sorted({at for each in found.values() for at in each.sizes if least <= at <= most})
    lines = {at: MeasuredCurve(tuple(ranked), tuple(found[each].at(at) for each in ranked)) for at in tokens}
    return profile({at: line.at(size) for at, line in lines.items()})


def decode_attention(files: Files, heads: Heads) -> Surface:
    """One layer's decode attention by sequences and context.

    The tables have at most 8 key-value heads: with more, a sequence counts as several with 8 (on an A100 within 2 to
    6 %, 11 % at worst).
    """
    groups = max(1, heads.key_value // 8)
    if groups > 1:
        heads = Heads(32, 8)
    points = {}
    for row in rows(
        files.path("generation_attention"), "batch_size", "num_heads", "num_key_value_heads", "step", "latency"
    ):
        batch = int(row["batch_size"])
        if _heads(row) == heads and (batch % groups == 0):
            points[batch // groups, int(row["step"]) + 1] = float(row["latency"]) * MS
    return surface(_without_scatter(points))


def _without_scatter(points: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """Contexts of powers of two: others add nothing, and curves stay short."""
    return {(batch, size): ns for (batch, size), ns in points.items() if size & (size - 1) == 0}


def prompt_attention(files: Files, heads: Heads) -> Surface:
    """One layer's prompt attention by chunk and tokens computed before.

    Only fresh prompts were measured. A chunk after others has the work ``chunk·(before + chunk/2)``, done at the speed
    at which a fresh prompt of the same full length does its own.
    """
    fresh = {}
    columns = ("batch_size", "isl", "num_heads", "num_key_value_heads", "latency")
    for row in rows(files.path("context_attention"), *columns):
        if int(row["batch_size"]) == 1 and _heads(row) == heads:
            fresh[int(row["isl"])] = float(row["latency"]) * MS
    measured = profile(fresh)
    return surface({(chunk, before): _after(measured, chunk, before) for chunk in fresh for before in BEFORE})


def _after(fresh: MeasuredCurve, chunk: int, before: int) -> float:
    whole = before + chunk
    work = chunk * (before + chunk / 2)
    return max(fresh.at(chunk), fresh.at(whole) * work / (whole * whole / 2)) if before else fresh.at(chunk)


def _heads(row: dict[str, str]) -> Heads:
    return Heads(int(row["num_heads"]), int(row["num_key_value_heads"]))


def all_reduce(files: Files, nccl: Path, *, ways: int) -> MeasuredCurve:
    """An all-reduce of a group of GPUs by bytes: vLLM's own for small messages, NCCL where that is faster.

    Args:
        nccl: APEX's measurements of the same GPU: gpu, num_nodes, num_gpus_per_node, dtype, size(kb), time(us).
    """
    custom = [
        (int(row["message_size"]), float(row["latency"]) * MS)
        for row in rows(files.path("custom_allreduce"), "kernel_source", "num_gpus", "message_size", "latency")
        if int(row["num_gpus"]) == ways and row["kernel_source"].endswith("graph")
    ]
    library = [
        (int(row["size(kb)"]) * 1024, float(row["time(us)"]) * US)
        for row in rows(nccl, "num_nodes", "num_gpus_per_node", "dtype", "size(kb)", "time(us)")
        if (row["num_nodes"], int(row["num_gpus_per_node"]), row["dtype"]) == ("1", ways, "half")
    ]
    if not custom or not library:
        raise ValueError(f"{files.path('custom_allreduce')}, {nccl}: no all-reduce of {ways} GPUs")
    either = averaged(custom), averaged(library)
    sizes = {size for measured in either for size in measured.sizes}
    return profile({size: min(measured.at(size) for measured in either) for size in sizes})
