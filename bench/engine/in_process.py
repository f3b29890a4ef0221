"""A real vLLM engine in this process, with random weights of one of the repository's shapes.

Only here and in recording_scheduler.py does bench/ touch vLLM. Call ``prepare()`` before vLLM is first imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VOCABULARY = 640
POSITIONS = 4096

# Sizes of the repository's models (models/training/model.py): hidden, layers, heads, kv heads, MLP, head size.
SHAPES = {
    "nano": (128, 3, 4, 2, 256, 32),
    "micro": (192, 5, 6, 2, 512, 32),
    "mini": (288, 8, 9, 3, 832, 32),
    "load-100m": (768, 14, 12, 12, 2048, 64),
}


def prepare(threads: int = 1) -> None:
    """Sets what vLLM reads from the environment at import: one process, quiet, no network, few threads."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS=str(threads),
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
    )


def llama_config(shape: str) -> dict[str, Any]:
    """config.json of a Llama of this shape."""
    hidden, layers, heads, kv_heads, mlp, head_size = SHAPES[shape]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "head_dim": head_size,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
    }


@contextlib.contextmanager
def open_engine(shape: str, fields: dict[str, Any] | None = None, /, **engine_args: Any) -> Iterator[Any]:
    """An LLMEngine; shut down at the end. Args: fields: Of its config.json, beside the shape's."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(llama_config(shape) | (fields or {})))
        defaults: dict[str, Any] = {
            "model": folder,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "distributed_executor_backend": "uni",
            "async_scheduling": False,
            "disable_log_stats": True,
            "block_size": 32,
            "max_model_len": 1024,
        }
        engine = LLMEngine.from_engine_args(EngineArgs(**{**defaults, **engine_args}))
        try:
            yield engine
        finally:
            engine.engine_core.shutdown()
