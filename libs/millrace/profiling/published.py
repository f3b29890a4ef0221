"""Engines put together from published kernel tables, by name. The tables are read from the data folder.

Source: the recipe for a mixed step in the data's notes: ``layers · (linear + prompt attention + decode attention) +
head + host``. What is not in any table is computed, and said here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from millrace.enginemodel.kernel_table import KernelTableStepTime
from millrace.enginemodel.measured import Profile, Surface
from millrace.enginemodel.steptime import Provenance
from millrace.profiling import tables

BATCHES = (1, 2, 4, 8, 16, 32, 48, 64, 128)
CONTEXTS = (1, 64, 256, 1024, 4096)
#: Host's share of a step with vLLM V0, ns, fixed and for each sequence: scheduling, inputs and sampling as measured on
#: an A100's host (Vidur, cpu_overheads, Llama on one GPU: 1.0 ms at batch 8, 1.5 at 32, 2.0 at 48). None of it overlaps
#: with kernels; the processing of outputs does, from 0.6 on.
V0_HOST = (0.81e6, 0.024e6)


def published_names() -> list[str]:
    """Engines that can be put together."""
    return sorted(ENGINES)


def published(name: str, data: Path) -> KernelTableStepTime:
    """The engine of this name from the tables under ``data``.

    Raises:
        ValueError: there is none, or a table is missing or wrong; the message says which.
    """
    if name not in ENGINES:
        raise ValueError(f"published engine {name!r}: unknown, there are {', '.join(published_names())}")
    return ENGINES[name](data)


def _a30_llama_2_7b(data: Path) -> KernelTableStepTime:
    """Block's testbed. Prompt attention is Qwen2-7B's on the same GPU, by heads: both are bound by arithmetic."""
    folder = data / "block_a30_profiling"
    _, prefill = tables.vidur_attention(folder / "a30_Qwen-2-7B_attention.csv")
    return KernelTableStepTime(
        layers=32,
        linear=tables.vidur_linear(folder / "a30_Llama-2-7b-hf_mlp.csv", tables.A30),
        decode=streamed(latency=35e3, bytes_per_token=4 * 32 * 128, bytes_per_second=900e9),
        prefill=scaled(prefill, 32 / 28),
        head=head(tables.A30, vocabulary=32_000, hidden=4096),
        host_fixed=V0_HOST[0],
        host_per_sequence=V0_HOST[1],
        provenance=Provenance(
            model="Llama-2-7B, float16",
            hardware=tables.A30.name,
            source="linear layers: Block's Vidur profile of an A30 (AKafakA/vidur_opt_scheduler), rows faster than the "
            "GPU's peak left out; decode attention: 35 us + KV bytes / 900 GB/s, fitted to Block's published spot "
            "values; "
            "prompt attention: Block's profile of Qwen2-7B by heads; head: weights at 80% of peak; host: vLLM V0 on an "
            "A100 "
            "host (microsoft/vidur)",
            error="not compared with a whole step",
        ),
    )


def streamed(*, latency: float, bytes_per_token: int, bytes_per_second: float) -> Surface:
    """Decode attention that reads KV at one bandwidth, ns for one layer."""
    rate = bytes_per_token / bytes_per_second * 1e9
    return Surface(
        BATCHES,
        tuple(Profile(CONTEXTS, tuple(latency + rate * batch * context for context in CONTEXTS)) for batch in BATCHES),
    )


def scaled(surface: Surface, factor: float) -> Surface:
    """All times longer by a factor."""
    profiles = tuple(Profile(each.sizes, tuple(ns * factor for ns in each.ns)) for each in surface.profiles)
    return Surface(surface.rows, profiles)


def head(hardware: tables.Hardware, *, vocabulary: int, hidden: int) -> Profile:
    """The language model's head: a matrix product at 80 % of what the GPU can do at most, as its like reach."""
    sizes = (1, 64, 128, 256, 512)
    weights = vocabulary * hidden
    return Profile(sizes, tuple(hardware.least_ns(weights=weights, tokens=size) / 0.8 for size in sizes))


ENGINES: dict[str, Callable[[Path], KernelTableStepTime]] = {
    "a30-llama-2-7b": _a30_llama_2_7b,
}
