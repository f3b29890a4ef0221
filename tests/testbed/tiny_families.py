"""Model families in their smallest: a config.json and a tokenizer, for engines that draw their weights at random."""

import json
from pathlib import Path
from typing import Any

from tests.testbed.tiny_llama import EOS, VOCABULARY, write_tokenizer

_COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 256, "eos_token_id": EOS, "pad_token_id": EOS}
_WIDTHS: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
_IMAGE_TOKENS = {"image_token_id": 260, "video_token_id": 261, "vision_start_token_id": 262, "vision_end_token_id": 263}

#: By name: what its config.json says.
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": _COMMON | _WIDTHS | {"architectures": ["BertModel"], "model_type": "bert", "type_vocab_size": 2},
    "qwen3-embedding": _COMMON
    | _WIDTHS
    | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
    "qwen3.5": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        **_IMAGE_TOKENS,
        "text_config": _COMMON
        | _WIDTHS
        | {
            "model_type": "qwen3_5_text",
            "head_dim": 32,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    },
}
#: What a family's folder holds beside it.
_BESIDE: dict[str, dict[str, Any]] = {
    "qwen3-embedding": {
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        ],
        "1_Pooling/config.json": {"word_embedding_dimension": 64, "pooling_mode_lasttoken": True},
    },
}


def build(folder: Path, family: str, **changes: Any) -> Path:
    """Writes a family's files, its configuration changed as told, for engines with ``load_format`` ``dummy``."""
    files = {"config.json": {**CONFIGS[family], **changes}, **_BESIDE.get(family, {})}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    write_tokenizer(folder)
    return folder
