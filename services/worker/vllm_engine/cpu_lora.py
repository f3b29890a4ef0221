"""A repair of vLLM's LoRA kernels for CPUs: a token without an adapter has the index -1, which they read as the last
adapter's, so that the model itself would say what that adapter says.
"""

from __future__ import annotations

from typing import Any

from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

_shrink = lora_ops.bgmv_shrink


def _shrink_with_adapter(
    inputs: Any, lora_b_weights: Any, output_tensor: Any, lora_indices_tensor: Any, scaling: float = 1.0
) -> None:
    _shrink(inputs, lora_b_weights, output_tensor, lora_indices_tensor, scaling)
    output_tensor.masked_fill_((lora_indices_tensor < 0).unsqueeze(1), 0)


def repair() -> None:
    """Has such tokens left alone. Idempotent."""
    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = _shrink_with_adapter
