"""Folders that vLLM and transformers load: weights, configuration, tokenizer."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from models.training.model import SHAPES, Llama, Shape
from models.training.tokenizer import BOS, EOS, PAD, TASKS, Flavour, build_tokenizer, write_tokenizer


def llama_config(shape: Shape) -> dict[str, Any]:
    """The Hugging Face configuration of a shape."""
    ids = {name: build_tokenizer().token_to_id(token) for name, token in (("bos", BOS), ("eos", EOS), ("pad", PAD))}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.width,
        "intermediate_size": shape.mlp_width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.positions,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rms_norm_eps": shape.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": ids["bos"],
        "eos_token_id": ids["eos"],
        "pad_token_id": ids["pad"],
    }


def save_model(model: Llama, folder: Path, flavour: Flavour = TASKS) -> None:
    """Writes everything but the card; the weights as bf16, last, so that a folder with weights is complete."""
    write_tokenizer(folder, flavour)
    config = llama_config(model.shape)
    _write_json(folder / "config.json", config)
    # Temperature 1 is what the answers' lengths were learnt at; a client that wants greedy asks for it.
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", {**generation, "do_sample": True, "temperature": 1.0})
    weights = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def load_model(size: str, folder: Path) -> Llama:
    """Reads a saved model back as float32 values."""
    model = Llama(SHAPES[size])
    model.load_state_dict({name: t.float() for name, t in load_file(str(folder / "model.safetensors")).items()})
    return model


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
