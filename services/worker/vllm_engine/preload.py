"""Imports what an engine process would import while it starts, so that forked ones have it. Touches no GPU."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch._inductor import codecache
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
#: What vLLM and transformers take functions from that hardly a model calls: a tenth of all imports.
_RARE = ("scipy.optimize", "scipy.signal")


class _Later(ModuleType):
    """Stands for a module until one of its functions is called."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(importlib.import_module(self.__name__), name)(*args, **kwargs)

        return call


def preload() -> None:
    """Imports the modules, and replaces vLLM's Triton kernels where each engine would."""
    hashing, hashed = _hash_torch() if (on_cpu := current_platform.is_cpu()) else (0, 0)
    later = {name: _Later(name) for name in _RARE if name not in sys.modules}
    sys.modules.update(later)
    for name in _ALWAYS + (_CPU if on_cpu else ()):
        importlib.import_module(name)
    for name in later:
        del sys.modules[name]
    if on_cpu:
        _replace_kernels_once()
        if key := os.read(hashed, 256):
            codecache.torch_key.clear()  # where a process forks that has preloaded, as tests do
            codecache.torch_key.set(key)
        os.close(hashed)
        os.waitpid(hashing, 0)
        importlib.import_module("services.worker.vllm_engine.compiling").preload()


def _hash_torch() -> tuple[int, int]:
    """Hashes torch's sources, the key of its caches, beside the imports: the process, and where the hash comes out."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(writing, codecache.torch_key())
        finally:
            os._exit(0)
    os.close(writing)
    return child, reading


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
