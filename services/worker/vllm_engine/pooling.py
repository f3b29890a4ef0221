"""Pooling as the contract says it, in vLLM's words; and vLLM's pooled tensors in the contract's pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from millrace.actor.engine import EngineSequence
from millrace.contracts.worker import PIECE_BYTES, PIECES_MAX, Pooled
from vllm.pooling_params import PoolingParams

_encode = msgspec.msgpack.Encoder().encode


def pooling_task(model_config: Any, supported: Sequence[Any]) -> str:
    """The task of a model's pooler, as vLLM chooses it; empty for one that generates text."""
    return (model_config.get_pooling_task(tuple(supported)) or "") if model_config.runner_type == "pooling" else ""


def pooling_params(sequence: EngineSequence, model_config: Any) -> PoolingParams:
    """VLLM's parameters.

    Raises:
        ValueError: the output would be larger than what one answer may have.
    """
    asked = sequence.sampling.pooling
    assert asked is not None
    if asked.task.startswith("token_"):
        width = model_config.embedding_size if asked.task == "token_embed" else model_config.hf_config.num_labels
        most = PIECES_MAX * PIECE_BYTES // (4 * max(1, width)) - 1
        if len(sequence.prompt_token_ids) > most:
            raise ValueError(f"With {width} values a token at most {most} tokens are taken at once.")
    extra = None if asked.second_from is None else {"compressed_token_type_ids": asked.second_from}
    return PoolingParams(
        task=asked.task or None,
        dimensions=asked.dimensions,
        use_activation=asked.use_activation,
        extra_kwargs=extra,
    )


def pieces(output: torch.Tensor) -> list[bytes]:
    """The pieces of a pooled output."""
    values = output.detach().to("cpu", torch.float32).contiguous()
    whole = _encode(Pooled(list(values.shape), values.numpy().tobytes()))
    return [whole[start : start + PIECE_BYTES] for start in range(0, len(whole), PIECE_BYTES)]
