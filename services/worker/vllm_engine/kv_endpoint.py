"""Identity and location of an engine's KV: the fingerprint of what the KV means, and the machine that it lies on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import vllm
from millrace.contracts.kv import KvEndpoint, KvGroup, KvNeed
from millrace.kvcopy.weights import weights_fingerprint

from services.worker.config import WorkerConfig
from services.worker.vllm_engine.kv_words import Offer

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def endpoint(config: WorkerConfig, vllm_config: Any, offer: Offer) -> KvEndpoint:
    """The endpoint of an engine that has made an offer."""
    return KvEndpoint(
        fingerprint=fingerprint(config, vllm_config, offer),
        block_tokens=offer.block_tokens,
        block_bytes=growth_bytes(offer.groups, offer.block_tokens),
        blocks=offer.blocks,
        copiers=offer.copiers,
        ranks=offer.ranks,
        machine=machine(),
        segments=config.migration.segments,
        groups=offer.groups,
    )


def growth_bytes(groups: list[KvGroup], block_tokens: int) -> int:
    """Bytes that a long sequence grows by per position. Where none of its groups grows, what it has per position."""
    growing = [group for group in groups if group.need is KvNeed.ALL] or groups
    return sum(group.block_bytes * max(1, block_tokens // group.block_tokens) for group in growing)


def fingerprint(config: WorkerConfig, vllm_config: Any, offer: Offer) -> str:
    """Hash of everything that gives the bytes of a block their meaning."""
    model = vllm_config.model_config
    hf_config = {**model.hf_config.to_dict(), "_name_or_path": None}
    said: dict[str, Any] = {
        "config": hf_config,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "weights": weights(str(model.model), config),
        "layout": offer.layout,
        "block_tokens": offer.block_tokens,
        "vllm": vllm.__version__,
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


def weights(model: str, config: WorkerConfig) -> str:
    """Hash of a model's weights; the seed where they are drawn from it, the name where they lie in no folder."""
    if config.load_format == "dummy":
        return f"dummy {config.seed}"
    return weights_fingerprint(model) or model


def machine() -> str:
    """Identifier that all processes of a host share, containers included; empty where the kernel does not say."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def incompatible(own: KvEndpoint, peer: KvEndpoint) -> str:
    """Reason why KV of ``peer`` means nothing here; empty where it can be used."""
    if own.fingerprint != peer.fingerprint:
        return "the two engines' models, layouts or versions differ"
    if len(own.ranks) != len(peer.ranks):
        return f"{len(peer.ranks)} ranks there, {len(own.ranks)} here"
    return ""
