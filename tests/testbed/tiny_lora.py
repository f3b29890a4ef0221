"""A LoRA adapter with random weights in PEFT's format, for tests.testbed.tiny_llama."""

import json
from pathlib import Path

from tests.testbed.tiny_llama import HEADS, LAYERS, WIDTH

#: Modules that it changes, with the width of what comes out.
MODULES = {"q_proj": WIDTH, "v_proj": WIDTH // HEADS * (HEADS // 2)}


def build(folder: Path, *, seed: int = 0, rank: int = 8, layers: int = LAYERS) -> Path:
    """Writes adapter_config.json and weights; returns the folder. They are large enough to change most texts."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(layers):
        for module, out in MODULES.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(rank, WIDTH, generator=generator) / 4
            weights[f"{name}.lora_B.weight"] = torch.randn(out, rank, generator=generator) / 4
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(MODULES), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
