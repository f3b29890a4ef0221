"""Tiers of the cascade benches: replica shapes of 8B, 32B, 70B and 671B models on H100s and H200s.

Step times of 8B, 32B and 70B models in 16 bits are of published kernel tables, with the host's share that 8B runs on an
H100 have; those of 70B in FP8 and 671B are fits to published end-to-end runs. Pipelines are modelled: no published
measurement of one backs them.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import msgspec
from millrace.enginemodel.coefficients import load_step_time
from millrace.enginemodel.parameters import EngineParameters

from bench.engine.fit_published import CALIBRATED
from bench.published.engines import composed, scaled
from bench.published.kernel_table import KernelTableStepTime
from bench.published.shapes import H100_BYTES, H200_BYTES, LLAMA_3_8B, LLAMA_3_70B, QWEN_3_32B, Shape
from bench.published.surface import MeasuredCurve
from bench.published.tables import H100, H200, Hardware
from papers.cascadia.pipelines import pipelined
from papers.cascadia.replicas import ReplicaShape

DATA = Path(os.environ.get("MILLRACE_DATA", "../shared/data"))
TABLES = {H100.name: "h100_sxm_vllm0.14.0", H200.name: "h200_sxm_vllm0.14.0"}
MEMORY = {H100.name: H100_BYTES, H200.name: H200_BYTES}
MODELS = (LLAMA_3_8B, QWEN_3_32B, LLAMA_3_70B)
TENSOR = (1, 2, 4, 8)
#: (tensor, pipeline) that stay within a server of 8.
PIPELINES = ((1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2))

BLOCK_TOKENS = 16
MODEL_LEN_MAX = 8192
#: Most requests at once in the runs that FP8 sets were fitted to.
FITTED_SEQUENCES = 64

#: A hop between stages within a server: latency, and 2 bytes of each hidden value at 200 GB/s. Assumed.
HOP_NS, HOP_BYTES_PER_NS = 10_000.0, 200.0

#: The 671B model in FP8, bytes: 1 a weight. Its KV is latent and whole on each GPU: 61 layers of 576 values in 16 bits.
GIANT_WEIGHT_BYTES, GIANT_KV_BYTES = 688e9, 61 * 576 * 2
GIANT_GPUS = 8


def has_data() -> bool:
    """Whether the published tables and scores are here."""
    return (DATA / "aiconfigurator_kernels").is_dir() and (DATA / "wildbench_judge_scores").is_dir()


def replica_shapes(shape: Shape, hardware: Hardware = H100, *, pipelines: bool = False) -> tuple[ReplicaShape, ...]:
    """Replicas of a model in 16 bits that fit in memory with at least one longest request."""
    found = [each for ways in TENSOR if (each := tensor_parallel(shape, hardware, ways)) is not None]
    if pipelines:
        lanes = (pipeline(shape, hardware, tensor, stages) for tensor, stages in PIPELINES)
        found += [each for each in lanes if each is not None]
    return tuple(found)


@cache
def tensor_parallel(shape: Shape, hardware: Hardware, ways: int) -> ReplicaShape | None:
    """One engine on a group of GPUs; None where it does not fit."""
    blocks = _blocks(shape, hardware, ways)
    return _engine(shape, hardware, ways, blocks) if blocks * BLOCK_TOKENS >= MODEL_LEN_MAX else None


@cache
def pipeline(shape: Shape, hardware: Hardware, tensor: int, stages: int) -> ReplicaShape | None:
    """A pipeline; None where a lane's share of the memory does not hold one longest request."""
    blocks = _blocks(shape, hardware, tensor * stages)
    if blocks // stages * BLOCK_TOKENS < MODEL_LEN_MAX:
        return None
    engine = _engine(shape, hardware, tensor, blocks)
    hop_token_ns = 2 * shape.hidden / HOP_BYTES_PER_NS
    return pipelined(engine, stages=stages, hop_ns=HOP_NS, hop_token_ns=hop_token_ns, blocks=blocks)


def _blocks(shape: Shape, hardware: Hardware, gpus: int) -> int:
    return shape.kv_tokens(gpus=gpus, memory_bytes=MEMORY[hardware.name]) // BLOCK_TOKENS


@cache
def _step_time(shape: Shape, hardware: Hardware, ways: int) -> KernelTableStepTime:
    tables = composed(DATA, shape=shape, hardware=hardware, tables_of=TABLES[hardware.name], ways=ways)
    factor = CALIBRATED["kernels"]
    return msgspec.structs.replace(
        tables,
        linear=MeasuredCurve(tables.linear.sizes, tuple(ns * factor for ns in tables.linear.ns)),
        decode=scaled(tables.decode, factor),
        prefill=scaled(tables.prefill, factor),
        host_fixed=CALIBRATED["host"],
    )


def _engine(shape: Shape, hardware: Hardware, ways: int, blocks: int) -> ReplicaShape:
    parameters = _parameters(blocks)
    return ReplicaShape(tensor=ways, cost=_step_time(shape, hardware, ways).cost(parameters), parameters=parameters)


def _parameters(blocks: int, sequences: int = 256) -> EngineParameters:
    return EngineParameters(
        max_model_len=MODEL_LEN_MAX,
        block_size=BLOCK_TOKENS,
        blocks_total=blocks,
        max_sequences=sequences,
        prefix_caching=False,
    )


@cache
def fp8_70b(hardware: Hardware) -> tuple[ReplicaShape, ...]:
    """Llama-3.1-70B in FP8 by tensor parallelism, fitted to vLLM's runs."""
    shape, found = msgspec.structs.replace(LLAMA_3_70B, bytes_per_weight=1), []
    name = "h100" if hardware is H100 else "h200"
    for ways in TENSOR if hardware is H200 else TENSOR[1:]:
        parameters = _parameters(_blocks(shape, hardware, ways), FITTED_SEQUENCES)
        cost = load_step_time(f"{name}-llama-3.1-70b-fp8-tp{ways}").cost(parameters)
        found.append(ReplicaShape(tensor=ways, cost=cost, parameters=parameters))
    return tuple(found)


@cache
def fp8_671b() -> tuple[ReplicaShape, ...]:
    """DeepSeek-V3 in FP8 on eight H200s, the one way of which there are co-located runs; fitted to SGLang's."""
    idle = 0.9 * H200_BYTES - GIANT_WEIGHT_BYTES / GIANT_GPUS
    parameters = _parameters(int(idle / GIANT_KV_BYTES / BLOCK_TOKENS), FITTED_SEQUENCES)
    cost = load_step_time("h200-deepseek-671b-fp8-tp8").cost(parameters)
    return (ReplicaShape(tensor=GIANT_GPUS, cost=cost, parameters=parameters),)


def h100_pair() -> list[tuple[ReplicaShape, ...]]:
    """8B and 70B, 16 bits, on H100s; no pipelines, which nothing measured backs."""
    return [replica_shapes(LLAMA_3_8B), replica_shapes(LLAMA_3_70B)]


def h200_three() -> list[tuple[ReplicaShape, ...]]:
    """8B in 16 bits, 70B and 671B in FP8, on H200s."""
    return [replica_shapes(LLAMA_3_8B, H200), fp8_70b(H200), fp8_671b()]
