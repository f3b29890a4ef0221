"""Small models with random weights of the families that people run, written to a folder: each keeps its state in other
groups of layers.

``FAMILIES`` has for each its configuration, for transformers, and what its engines are started with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from tests.testbed import tiny_llama

#: Of every family, unless it names its own.
_SHAPE: dict[str, Any] = {
    "vocab_size": tiny_llama.VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 256,
    "eos_token_id": tiny_llama.EOS,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.08,
}


#: Drafts by n-grams that came before.
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


class Family(NamedTuple):
    """Recipe of one.

    Attributes:
        config: Name of its configuration in transformers.
        fields: Of that, beside those of all.
        keeps: Groups of layers, for people.
        engine: VLLM's arguments.
    """

    config: str
    fields: dict[str, Any]
    keeps: str
    engine: dict[str, Any] = {}


FAMILIES = {
    "llama": Family("LlamaConfig", {}, "full attention"),
    "llama-ngram": Family(
        "LlamaConfig", {}, "full attention, tokens drafted by n-grams", {"speculative_config": NGRAM}
    ),
    "mistral": Family("MistralConfig", {"sliding_window": 64}, "sliding window"),
    "gemma3": Family(
        "Gemma3TextConfig",
        {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2, "query_pre_attn_scalar": 32},
        "sliding window, full attention",
    ),
    "granite4-hybrid": Family(
        "GraniteMoeHybridConfig",
        {
            "layer_types": ["mamba", "attention"] * 2,
            "num_local_experts": 0,
            "shared_intermediate_size": 64,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
        },
        "Mamba 2, full attention",
    ),
    "mamba2": Family(
        "Mamba2Config",
        {"num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 1, "expand": 2, "chunk_size": 64},
        "Mamba 2",
    ),
    "gemma4": Family(
        "Gemma4TextConfig",
        {
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "global_head_dim": 64,
            "vocab_size_per_layer_input": tiny_llama.VOCABULARY,
            "hidden_size_per_layer_input": 16,
        },
        "sliding window, full attention of wider heads",
    ),
    "gpt-oss": Family(
        "GptOssConfig",
        {
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        "sliding window, full attention, with sinks",
    ),
    "falcon-h1": Family(
        "FalconH1Config",
        {"mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 64},
        "Mamba 2 and full attention in each layer",
    ),
    "qwen3-moe": Family(
        "Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}, "full attention"
    ),
}


def build(folder: Path, family: Family, *, seed: int = 0) -> Path:
    """Writes config.json, weights and tokenizer of a family; returns the folder."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, family.config)(**{**_SHAPE, **family.fields})
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.float32)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, safe_serialization=True)
    tiny_llama.write_tokenizer(folder)
    return folder
