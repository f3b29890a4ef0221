"""Engines put together from published kernel tables, by name. The tables are read from the data folder.

Source: the recipe for a mixed step in the data's notes: ``layers · (linear + prompt attention + decode attention) +
head + host``. What is not in any table is computed, and said here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
from millrace.enginemodel.step_time_models import Provenance

from bench.published import tables, tables_aiconfigurator, tables_servingsim
from bench.published.kernel_table import KernelTableStepTime
from bench.published.shapes import LLAMA_2_7B, LLAMA_3_8B, LLAMA_3_70B, QWEN_2_7B, QWEN_3_32B, Shape
from bench.published.surface import MeasuredCurve, Surface
from bench.published.tables import A30, A100, H100, H200, RTX4090, Hardware
from bench.published.tables_aiconfigurator import Files, Heads

BATCHES = (1, 2, 4, 8, 16, 32, 48, 64, 128)
CONTEXTS = (1, 64, 256, 1024, 4096)
#: Host's share of a step with vLLM V0, ns, fixed and for each sequence: scheduling, inputs and sampling as measured on
#: an A100's host (Vidur, cpu_overheads, Llama on one GPU: 1.0 ms at batch 8, 1.5 at 32, 2.0 at 48). None of it overlaps
#: with kernels; the processing of outputs does, from 0.6 on.
V0_HOST = (0.81e6, 0.024e6)
#: What memory-bound kernels reach of the memory's peak.
EFFICIENCY = 0.8
#: KV tokens that an RTX 4090 has room for beside Llama-3.1-8B, as vLLM says in the same data's run.
RTX4090_KV_TOKENS = 41_408
#: A small kernel within a captured graph, ns.
LAUNCH = 2e3
SMALL_KERNELS = 5  # of a layer: two norms, rotation, activation, writing KV


#: APEX's measurements of NCCL.
NCCL = {H100.name: "H100-SXM-80GB_all_reduce.csv", H200.name: "H200-SXM-141GB_all_reduce.csv"}


class Kernels(NamedTuple):
    """Kernel times of one layer on one GPU."""

    linear: MeasuredCurve
    decode: Surface
    prefill: Surface


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
    source = (
        "linear layers: Block's Vidur profile of an A30 (AKafakA/vidur_opt_scheduler), rows faster than the GPU's peak "
        "left out; decode attention: 35 us + KV bytes / 900 GB/s, fitted to Block's published spot values; prompt "
        "attention: Block's profile of Qwen2-7B by heads; host: vLLM V0 on an A100's host (microsoft/vidur)"
    )
    kernels = Kernels(
        linear=tables.vidur_linear(folder / "a30_Llama-2-7b-hf_mlp.csv", A30),
        decode=streamed(latency=35e3, bytes_per_token=LLAMA_2_7B.kv_bytes_per_token, bytes_per_second=900e9),
        prefill=scaled(prefill, LLAMA_2_7B.heads / QWEN_2_7B.heads),
    )
    return _engine(LLAMA_2_7B, A30, source, kernels, host=V0_HOST)


def _a30_qwen_2_7b(data: Path) -> KernelTableStepTime:
    folder = data / "block_a30_profiling"
    decode, prefill = tables.vidur_attention(folder / "a30_Qwen-2-7B_attention.csv")
    source = (
        "Block's Vidur profile of an A30 (AKafakA/vidur_opt_scheduler), rows faster than the GPU's peak left out; "
        "host: vLLM V0 on an A100's host (microsoft/vidur)"
    )
    linear = tables.vidur_linear(folder / "a30_Qwen-2-7B_mlp.csv", A30)
    return _engine(QWEN_2_7B, A30, source, Kernels(linear, decode, prefill), host=V0_HOST)


def _vidur_linear(data: Path, *, shape: Shape, hardware: Hardware, linear: str, attention: str) -> KernelTableStepTime:
    """Linear layers by Vidur, attention by aiconfigurator."""
    files, heads = Files(data / "aiconfigurator_kernels", attention), Heads(shape.heads, shape.key_value_heads)
    source = (
        "linear layers: Vidur's profile (microsoft/vidur); attention: aiconfigurator's tables "
        f"(ai-dynamo/aiconfigurator, {attention}); no host time"
    )
    kernels = Kernels(
        linear=tables.vidur_linear(data / "vidur_profiling" / linear, hardware),
        decode=tables_aiconfigurator.decode_attention(files, heads),
        prefill=tables_aiconfigurator.prompt_attention(files, heads),
    )
    return _engine(shape, hardware, source, kernels)


def composed(data: Path, *, shape: Shape, hardware: Hardware, tables_of: str, ways: int = 1) -> KernelTableStepTime:
    """All of a model from aiconfigurator's tables, on one GPU of a tensor-parallel group of ``ways``."""
    files = Files(data / "aiconfigurator_kernels", tables_of)
    heads = Heads(shape.heads // ways, max(1, shape.key_value_heads // ways))
    source = (
        f"matrix products, attention and all-reduces: aiconfigurator's tables (ai-dynamo/aiconfigurator, {tables_of}); "
        "NCCL: APEX (microsoft/apex_plus); "
        f"small kernels: bytes at {EFFICIENCY:.0%} of peak and 2 us each; no host time"
    )
    kernels = Kernels(
        linear=_projections(files, shape, hardware, ways),
        decode=tables_aiconfigurator.decode_attention(files, heads),
        prefill=tables_aiconfigurator.prompt_attention(files, heads),
    )
    engine = _engine(shape, hardware, source, kernels, ways=ways)
    if ways == 1:
        return engine
    nccl = data / "apex_comm" / NCCL[hardware.name]
    reduce = tables_aiconfigurator.all_reduce(files, nccl, ways=ways)
    return msgspec.structs.replace(engine, all_reduce=reduce, hidden_bytes=2 * shape.hidden)


def _rtx4090_llama_3_8b(data: Path) -> KernelTableStepTime:
    stem = str(data / "llmservingsim_rtx" / "RTX4090_Llama-3.1-8B_tp1_")
    decode, prefill = tables_servingsim.attention(Path(stem + "attention.csv"))
    mixed, mixed_work = tables_servingsim.mixed_attention(Path(stem + "attention.csv"), kv_tokens=RTX4090_KV_TOKENS)
    source = "LLMServingSim's profile of vLLM 0.19, one layer, enforce_eager (casys-kaist/LLMServingSim); no host time"
    return KernelTableStepTime(
        layers=LLAMA_3_8B.layers,
        linear=tables_servingsim.linear(Path(stem + "dense.csv")),
        decode=decode,
        prefill=prefill,
        mixed=mixed,
        mixed_work=mixed_work,
        head=tables_servingsim.head(Path(stem + "per_sequence.csv")),
        provenance=_provenance(LLAMA_3_8B, RTX4090, source),
    )


def _projections(files: Files, shape: Shape, hardware: Hardware, ways: int) -> MeasuredCurve:
    """One layer's four matrix products, and what is between them."""
    parts = [
        tables_aiconfigurator.matrix_product(files, outputs=outputs, inputs=inputs)
        for outputs, inputs in (
            (shape.qkv_width // ways, shape.hidden),
            (shape.hidden, shape.heads * shape.head_size // ways),
            (2 * shape.expanded // ways, shape.hidden),
            (shape.hidden, shape.expanded // ways),
        )
    ]
    moved = 2 * (8 * shape.hidden + 2 * shape.qkv_width // ways + 3 * shape.expanded // ways)
    per_token = moved / (EFFICIENCY * hardware.bytes_per_second) * 1e9
    sizes = sorted(set.intersection(*(set(part.sizes) for part in parts)))
    small = SMALL_KERNELS * LAUNCH
    return tables.profile({size: small + per_token * size + sum(part.at(size) for part in parts) for size in sizes})


def _engine(
    shape: Shape,
    hardware: Hardware,
    source: str,
    kernels: Kernels,
    *,
    host: tuple[float, float] = (0.0, 0.0),
    ways: int = 1,
) -> KernelTableStepTime:
    return KernelTableStepTime(
        layers=shape.layers,
        linear=kernels.linear,
        decode=kernels.decode,
        prefill=kernels.prefill,
        head=head(hardware, shape, ways),
        host_fixed=host[0],
        host_per_sequence=host[1],
        provenance=_provenance(shape, hardware, source + "; head: its weights at 80% of peak"),
    )


def _provenance(shape: Shape, hardware: Hardware, source: str) -> Provenance:
    return Provenance(model=shape.name, hardware=hardware.name, source=source, error="not compared with whole steps")


def streamed(*, latency: float, bytes_per_token: int, bytes_per_second: float) -> Surface:
    """Decode attention that reads KV at one bandwidth, ns for one layer."""
    rate = bytes_per_token / bytes_per_second * 1e9
    return Surface(
        BATCHES,
        tuple(
            MeasuredCurve(CONTEXTS, tuple(latency + rate * batch * context for context in CONTEXTS))
            for batch in BATCHES
        ),
    )


def scaled(surface: Surface, factor: float) -> Surface:
    """All times longer by a factor."""
    profiles = tuple(MeasuredCurve(each.sizes, tuple(ns * factor for ns in each.ns)) for each in surface.profiles)
    return Surface(surface.rows, profiles)


def head(hardware: Hardware, shape: Shape, ways: int = 1) -> MeasuredCurve:
    """The language model's head: a matrix product at 80 % of what the GPU can do at most, as its like reach."""
    sizes = (1, 64, 128, 256, 512)
    weights = shape.vocabulary * shape.hidden // ways
    return MeasuredCurve(sizes, tuple(hardware.least_ns(weights=weights, tokens=size) / EFFICIENCY for size in sizes))


ENGINES: dict[str, Callable[[Path], KernelTableStepTime]] = {
    "a30-llama-2-7b": _a30_llama_2_7b,
    "a30-qwen2-7b": _a30_qwen_2_7b,
    "a100-llama-3-8b": partial(
        _vidur_linear,
        shape=LLAMA_3_8B,
        hardware=A100,
        linear="a100_Meta-Llama-3-8B_mlp.csv",
        attention="a100_sxm_vllm0.14.0",
    ),
    "h100-llama-2-7b": partial(
        _vidur_linear,
        shape=LLAMA_2_7B,
        hardware=H100,
        linear="h100_Llama-2-7b-hf_mlp.csv",
        attention="h100_sxm_vllm0.14.0",
    ),
    "h100-llama-3-8b": partial(composed, shape=LLAMA_3_8B, hardware=H100, tables_of="h100_sxm_vllm0.14.0"),
    "h200-llama-3-8b": partial(composed, shape=LLAMA_3_8B, hardware=H200, tables_of="h200_sxm_vllm0.14.0"),
    "rtx4090-llama-3.1-8b": _rtx4090_llama_3_8b,
    **{
        f"h100-qwen3-32b-tp{ways}": partial(
            composed, shape=QWEN_3_32B, hardware=H100, tables_of="h100_sxm_vllm0.14.0", ways=ways
        )
        for ways in (2, 4, 8)
    },
    **{
        f"h100-llama-3-8b-tp{ways}": partial(
            composed, shape=LLAMA_3_8B, hardware=H100, tables_of="h100_sxm_vllm0.14.0", ways=ways
        )
        for ways in (2, 4, 8)
    },
    **{
        f"h100-llama-3-70b-tp{ways}": partial(
            composed, shape=LLAMA_3_70B, hardware=H100, tables_of="h100_sxm_vllm0.14.0", ways=ways
        )
        for ways in (2, 4, 8)
    },
}
