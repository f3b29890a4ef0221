"""Small models with random weights of the families that people run, written to a folder: each keeps its state in other
groups of layers.

``FAMILIES`` has for each its configuration, for transformers, and what its engines are started with. ``python -m
tests.testbed.moving_families`` writes the table in docs/MIGRATION.md, from what the suite noted in families.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from tests.testbed import tiny_llama

#: Of every family, unless it names its own.
_SHAPE: dict[str, Any] = {
    "vocab_size": tiny_llama.VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
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


_WINDOW: dict[str, Any] = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}


#: Folder beside a model's files with what drafts for it.
DRAFT = "draft"


class Family(NamedTuple):
    """Recipe of one: its configuration in transformers, and its engine's arguments; ``keeps`` is for people."""

    config: str
    fields: dict[str, Any]
    keeps: str
    engine: dict[str, Any] = {}


FAMILIES = {
    "llama": Family("LlamaConfig", {}, "full attention"),
    "llama-ngram": Family(
        "LlamaConfig", {}, "full attention, tokens drafted by n-grams", {"speculative_config": NGRAM}
    ),
    "llama-eagle": Family(
        "LlamaConfig",
        {},
        "full attention, tokens drafted by EAGLE",
        {"speculative_config": {"method": "eagle", "model": DRAFT, "num_speculative_tokens": 3}},
    ),
    "llama-eagle3": Family(
        "LlamaConfig",
        {"num_key_value_heads": 4, "attention_bias": True},
        "full attention, tokens drafted by EAGLE 3",
        {"speculative_config": {"method": "eagle3", "model": DRAFT, "num_speculative_tokens": 3}},
    ),
    "llama-draft": Family(
        "LlamaConfig",
        {},
        "full attention, tokens drafted by a model",
        {"speculative_config": {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 3}},
    ),
    "glm4-moe-mtp": Family(
        "Glm4MoeConfig",
        _EXPERTS
        | {"use_qk_norm": True, "attention_bias": True}
        | {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 1},
        "full attention, tokens drafted by MTP",
        {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}},
    ),
    "mistral": Family("MistralConfig", {"sliding_window": 64}, "sliding window"),
    "gemma3": Family("Gemma3TextConfig", _WINDOW | {"query_pre_attn_scalar": 32}, "sliding window, full attention"),
    "granite4-hybrid": Family(
        "GraniteMoeHybridConfig",
        {
            "layer_types": ["mamba", "attention"],
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
        _WINDOW
        | {
            "global_head_dim": 64,
            "vocab_size_per_layer_input": tiny_llama.VOCABULARY,
            "hidden_size_per_layer_input": 16,
        },
        "sliding window, full attention of wider heads",
    ),
    "gpt-oss": Family(
        "GptOssConfig",
        _WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2},
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
    "mixtral": Family(
        "MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}, "full attention"
    ),
    "glm4-moe": Family("Glm4MoeConfig", _EXPERTS | {"use_qk_norm": True, "attention_bias": True}, "full attention"),
    "qwen2": Family("Qwen2Config", {}, "full attention"),
    "cohere2": Family("Cohere2Config", _WINDOW, "sliding window, full attention without positions"),
    "exaone4": Family("Exaone4Config", _WINDOW | {"sliding_window_pattern": "LG"}, "sliding window, full attention"),
    "llama4": Family(
        "Llama4TextConfig",
        {
            "layer_types": ["chunked_attention", "full_attention"],
            "attention_chunk_size": 64,
            "no_rope_layers": [1, 0],
            "intermediate_size_mlp": 256,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
        },
        "chunked local attention, full attention",
    ),
    "nemotron-h": Family(
        "NemotronHConfig",
        {
            "num_hidden_layers": 3,
            "hybrid_override_pattern": "M*-",
            "layers_block_type": ["mamba", "attention", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 1,
            "attention_head_dim": 32,
        },
        "Mamba 2, full attention",
    ),
    "zamba2": Family(
        "Zamba2Config",
        {
            "layers_block_type": ["mamba", "hybrid"],
            "num_key_value_heads": 4,
            "attention_head_dim": 64,
            "head_dim": None,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_ngroups": 1,
            "n_mamba_heads": 8,
            "num_mem_blocks": 1,
            "adapter_rank": 16,
        },
        "Mamba 2 in each layer, full attention that layers share",
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
    if drafts_by_model(family):
        with torch.no_grad():
            table = model.get_input_embeddings().weight
            table /= table.pow(2).mean(-1, keepdim=True).sqrt().clamp(min=1e-6)  # that of the padding is zero
    model.save_pretrained(folder, safe_serialization=True)
    tiny_llama.write_tokenizer(folder)
    if drafts_by_model(family):
        _DRAFTERS[family.engine["speculative_config"]["method"]](folder, model)
    return folder


def drafts_by_model(family: Family) -> bool:
    """Whether layers that keep KV draft its tokens."""
    return bool(family.engine.get("speculative_config", NGRAM)["method"] != NGRAM["method"])


def _write_eagle(folder: Path, model: Any) -> None:
    """Writes a head of EAGLE: the same layers again, which see each token but the first, and nothing of the model's
    states. So it says nearly always what the model says, as long as it has its KV.

    A head has no norm before its first layer; where embeddings have length one, that does nothing.
    """
    layers = {name: weight for name, weight in _weights(folder).items() if name.startswith("layers.")}
    del layers["layers.0.input_layernorm.weight"]
    _save_head(folder, model.config, layers | {"fc.weight": _first_half(model.config)})


def _write_eagle3(folder: Path, model: Any) -> None:
    """As that of EAGLE, behind a layer in which each position attends to itself: the first of EAGLE 3 adds the token to
    the model's states by its attention alone.

    Queries and keys of that layer are the same everywhere: rotated, a position's are most like its own.
    """
    import torch

    config = model.config
    model_weights = _weights(folder)
    weights = {f"layers.{at + 1}.{rest}": weight for at, rest, weight in _by_layer(model_weights)}
    for name, like in ((rest, weight) for at, rest, weight in _by_layer(model_weights) if at == 0):
        made = torch.ones_like(like) if name.endswith("norm.weight") else torch.zeros_like(like)
        if name in ("self_attn.q_proj.bias", "self_attn.k_proj.bias"):
            made += 15.0
        if name in ("self_attn.q_proj.weight", "self_attn.k_proj.weight"):
            made = torch.cat([made, made], dim=1)
        weights[f"layers.0.{name}"] = made
    width = config.hidden_size
    weights["layers.0.hidden_norm.weight"] = torch.zeros(width)
    weights["layers.0.self_attn.v_proj.weight"] = _first_half(config)
    weights["layers.0.self_attn.o_proj.weight"] = torch.eye(width)
    weights |= {"fc.weight": torch.zeros(width, 3 * width), "norm.weight": model_weights["norm.weight"]}
    weights["lm_head.weight"] = model_weights["lm_head.weight"]
    config.num_hidden_layers += 1
    config.norm_before_residual = True
    config.eagle_aux_hidden_state_layer_ids = [0, 1, 2]
    _save_head(folder, config, weights)


def _write_mtp(folder: Path, model: Any) -> None:
    """Adds to a model of one layer that layer again, which drafts from tokens alone, as the head of EAGLE above."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    drafts = {name.replace(".0.", ".1.", 1): weight for name, weight in weights.items() if ".layers.0." in name}
    drafts |= {f"model.layers.1.{norm}.weight": torch.ones(model.config.hidden_size) for norm in ("enorm", "hnorm")}
    drafts["model.layers.1.eh_proj.weight"] = _first_half(model.config)
    drafts["model.layers.1.embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    drafts["model.layers.1.shared_head.norm.weight"] = weights["model.norm.weight"]
    drafts["model.layers.1.shared_head.head.weight"] = weights["lm_head.weight"]
    drafts = {name: weight.clone() for name, weight in drafts.items()}
    save_file(weights | drafts, folder / "model.safetensors", metadata={"format": "pt"})


def _write_draft(folder: Path, model: Any) -> None:
    """Writes the same model again."""
    model.save_pretrained(folder / DRAFT, safe_serialization=True)


_DRAFTERS = {"eagle": _write_eagle, "eagle3": _write_eagle3, "mtp": _write_mtp, "draft_model": _write_draft}


def _weights(folder: Path) -> dict[str, Any]:
    """Those of a model in a folder, named as in a head."""
    from safetensors.torch import load_file

    return {name.removeprefix("model."): weight for name, weight in load_file(folder / "model.safetensors").items()}


def _by_layer(weights: dict[str, Any]) -> list[tuple[int, str, Any]]:
    """(layer, the rest of its name, weight) of each that is in a layer."""
    names = [name.split(".", 2) for name in weights if name.startswith("layers.")]
    return [(int(at), rest, weights[f"layers.{at}.{rest}"]) for _, at, rest in names]


def _first_half(config: Any) -> Any:
    """A matrix that takes the first of two vectors: that of the token, before that of the model's states."""
    import torch

    width = config.hidden_size
    return torch.cat([torch.eye(width), torch.zeros(width, width)], dim=1)


def _save_head(folder: Path, config: Any, weights: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    config.save_pretrained(folder / DRAFT)
    save_file(weights, folder / DRAFT / "model.safetensors", metadata={"format": "pt"})


def engine_args(family: Family, folder: Path) -> dict[str, Any]:
    """VLLM's arguments for a family in a folder that ``build`` filled."""
    drafts = family.engine.get("speculative_config", {})
    if "model" not in drafts:
        return family.engine
    return family.engine | {"speculative_config": drafts | {"model": str(folder / DRAFT)}}


PAGE = Path(__file__).resolve().parents[2] / "docs" / "MIGRATION.md"
#: What each family has passed, the last time that it ran: tokens of ``text``, ``moves`` under load, ``kills``.
PASSED = Path(__file__).resolve().with_name("families.json")
_HEAD = (
    "| family | layers keep | text | there and back | from its tokens alone | moves under load, other tokens "
    "| over HTTP, handed over, drained, after kill -9 |\n"
    "|---|---|---|---|---|---|---|\n"
)


def note(name: str, part: str, count: int) -> None:
    """A family passed so much of a part of the suite."""
    passed = json.loads(PASSED.read_text())
    passed.setdefault(name, {})[part] = count
    lines = (f" {json.dumps(each)}: {json.dumps(what)}" for each, what in sorted(passed.items()))
    PASSED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def table() -> str:
    """Rows of the families that passed, in order."""
    passed = json.loads(PASSED.read_text())
    rows = []
    for name, family in FAMILIES.items():
        if name in passed:
            load = f"{passed[name]['moves']}, 0" if passed[name].get("moves") else "–"
            cluster = "equal" if passed[name].get("kills") else "–"
            rows.append(f"| {name} | {family.keeps} | equal | equal | equal | {load} | {cluster} |\n")
    return _HEAD + "".join(rows)


def table_in_page() -> str:
    """The table as the page has it."""
    after = PAGE.read_text().split("| family |")[1]
    return "| family |" + after.split("\n\n")[0] + "\n"


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().replace(table_in_page(), table()))
