"""Tiers of the cascade benches: replica shapes of 8B, 32B and 70B models on H100s, and judged samples.

Step times are of Llama-3-8B, Qwen3-32B and Llama-3-70B from published kernel tables. Scores are WildBench's, of other
models (gemma-2b-it, reka-flash, Qwen1.5-72B-Chat): no public data hold lengths, scores and step times of the same ones.
"""

from __future__ import annotations

import csv
import os
from functools import cache
from pathlib import Path

import numpy as np
from millrace.cascade.replicas import ReplicaShape
from millrace.cascade.sample import JudgedSample
from millrace.enginemodel.kernel_table import KernelTableStepTime
from millrace.enginemodel.parameters import EngineParameters
from millrace.profiling.published import composed
from millrace.profiling.shapes import LLAMA_3_8B, QWEN_3_32B, Shape
from millrace.profiling.tables import H100

DATA = Path(os.environ.get("MILLRACE_DATA", "../shared/data"))
TABLES = "h100_sxm_vllm0.14.0"

LLAMA_3_70B = Shape(
    name="Llama-3-70B, bfloat16",
    layers=80,
    hidden=8192,
    heads=64,
    key_value_heads=8,
    expanded=28_672,
    vocabulary=128_256,
)
MODELS = (LLAMA_3_8B, QWEN_3_32B, LLAMA_3_70B)
TENSOR = (1, 2, 4, 8)

#: vLLM's default share of the memory, and an H100's, bytes.
MEMORY_SHARE = 0.9
H100_BYTES = 80e9
BLOCK_TOKENS = 16
MODEL_LEN_MAX = 8192

#: Characters per token, to turn WildBench's output lengths into tokens: assumed, its texts are not here.
CHARACTERS_PER_TOKEN = 4.0
#: Log-normal prompt lengths, tokens: assumed, WildBench's prompts are not here.
PROMPT_MEDIAN, PROMPT_SIGMA = 700.0, 1.0
JUDGED = ("gemma-2b-it", "reka-flash-20240226", "Qwen1.5-72B-Chat")


def has_data() -> bool:
    """Whether the published tables and scores are here."""
    return (DATA / "aiconfigurator_kernels").is_dir() and (DATA / "wildbench_judge_scores").is_dir()


def weight_bytes(shape: Shape) -> float:
    """Bytes of all weights: attention, gated MLP, embedding and head."""
    attention = shape.hidden * shape.qkv_width + shape.heads * shape.head_size * shape.hidden
    layer = attention + 3 * shape.hidden * shape.expanded
    return float(shape.bytes_per_weight * (shape.layers * layer + 2 * shape.vocabulary * shape.hidden))


def kv_blocks(shape: Shape, gpus: int) -> int:
    """KV blocks that fit beside the weights on so many H100s."""
    idle = MEMORY_SHARE * H100_BYTES * gpus - weight_bytes(shape)
    return int(idle / (shape.kv_bytes_per_token * shape.layers * BLOCK_TOKENS))


@cache
def replica_shapes(shape: Shape) -> tuple[ReplicaShape, ...]:
    """Tensor-parallel replicas of a model that fit in memory with at least one longest request."""
    found = []
    for ways in TENSOR:
        blocks = kv_blocks(shape, ways)
        if blocks * BLOCK_TOKENS < MODEL_LEN_MAX:
            continue
        parameters = EngineParameters(
            max_model_len=MODEL_LEN_MAX, block_size=BLOCK_TOKENS, blocks_total=blocks, prefix_caching=False
        )
        step_time: KernelTableStepTime = composed(DATA, shape=shape, hardware=H100, tables_of=TABLES, ways=ways)
        found.append(ReplicaShape(tensor=ways, cost=step_time.cost(parameters), parameters=parameters))
    return tuple(found)


def wildbench(seed: int = 0) -> JudgedSample:
    """WildBench's 763 conversations; GPT-4o's scores route and grade, so the quality of routed answers is inflated."""
    path = DATA / "wildbench_judge_scores" / "wildbench_v2.0522_gpt4o_scores.csv"
    rows = list(csv.DictReader(path.open(encoding="utf-8")))
    rng = np.random.default_rng(seed)
    quality = np.array([[10 * float(row[f"score_{name}"]) for name in JUDGED] for row in rows])
    outputs = np.array([[float(row[f"output_chars_{name}"]) / CHARACTERS_PER_TOKEN for name in JUDGED] for row in rows])
    prompts = np.exp(rng.normal(np.log(PROMPT_MEDIAN), PROMPT_SIGMA, len(rows)))
    half = MODEL_LEN_MAX // 2
    return JudgedSample(
        scores=quality[:, :-1],
        quality=quality,
        prompt_tokens=np.repeat(np.clip(prompts, 1, half).astype(np.int64)[:, None], len(JUDGED), axis=1),
        output_tokens=np.clip(outputs, 1, half - 1).astype(np.int64),
    )
