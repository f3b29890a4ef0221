"""Imports what an engine process would import while it starts, so that forked ones have it. Touches no GPU."""

from __future__ import annotations

import importlib
import warnings

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
    """Imports the modules, and replaces vLLM's Triton kernels where each engine would."""
    for name in _ALWAYS + (_CPU if current_platform.is_cpu() else ()):
        importlib.import_module(name)
    if current_platform.is_cpu():
        _replace_kernels_once()
        importlib.import_module("services.worker.vllm_engine.compiling").preload()


def _replace_kernels_once() -> None:
    """Lets the platform replace Triton kernels now, and not again in forked engines.

    vLLM reads each attribute of each imported module to find who holds a kernel. In a forked engine that takes a
    quarter of a second and copies most pages that it shares with its parent. Modules imported later find the
    replacements.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated names that it reads
        current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = staticmethod(lambda: None)
