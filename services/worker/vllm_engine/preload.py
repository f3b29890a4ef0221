"""Imports what an engine process would import while it starts, so that forked ones have it. Touches no GPU."""

from __future__ import annotations

import importlib

from vllm.platforms import current_platform

_ALWAYS = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.structured_output.backend_xgrammar",
    "services.worker.vllm_engine.engine",
    "services.worker.vllm_engine.snapshot_scheduler",
)
_CPU = (
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "services.worker.vllm_engine.runner",
)


def preload() -> None:
    """Imports the modules."""
    for name in _ALWAYS + (_CPU if current_platform.is_cpu() else ()):
        importlib.import_module(name)
