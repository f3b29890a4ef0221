"""Import vLLM's parsers without torch: 2 s and 120 MB instead of 8 s and 600 MB.

Parsers are text processing; what draws torch in are names of types and modules that they never call. Those modules are
replaced by hollow ones. It holds for one version of vLLM, and for a process that does nothing else with it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_HOLLOW = (
    "torch", "transformers", "vllm.config", "vllm.distributed", "vllm.inputs", "vllm.model_executor", "vllm.multimodal",
    "vllm.platforms", "vllm.renderers", "vllm.transformers_utils",
)  # fmt: skip


class _HollowMeta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Hollow

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __getitem__(cls, item: Any) -> Any:
        return cls


class Hollow(metaclass=_HollowMeta):
    """Stands for any class or function; as a decorator it changes nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    @classmethod
    def __get_pydantic_core_schema__(cls, *args: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()


class _HollowModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Hollow


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not any(name == each or name.startswith(f"{each}.") for each in _HOLLOW):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _HollowModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "vllm.renderers.chat_utils":
            vars(module).update(make_tool_call_id=make_tool_call_id, get_tool_call_id_type=get_tool_call_id_type)


def get_tool_call_id_type(model_config: Any) -> str:
    """As ``vllm.renderers.chat_utils`` has it."""
    return "kimi_k2" if model_config.hf_config.model_type in ("kimi_k2", "kimi_k25", "kimi_k3") else "random"


def make_tool_call_id(id_type: str = "random", func_name: str | None = None, idx: int | None = None) -> str:
    """As ``vllm.renderers.chat_utils`` has it."""
    return f"functions.{func_name}:{idx}" if id_type == "kimi_k2" else f"chatcmpl-tool-{uuid.uuid4().hex}"


def parser_manager() -> Any:
    """VLLM's ``ParserManager``.

    Raises:
        ImportError: vLLM is not installed, or needs what is hollow here.
    """
    spec = importlib.util.find_spec("vllm")  # finds, does not import
    if spec is None or spec.origin is None:
        raise ImportError("vLLM is not installed")
    os.environ["TVM_FFI_DISABLE_TORCH_C_DLPACK"] = "1"  # xgrammar's library would compile something for torch
    package = types.ModuleType("vllm")
    package.__path__ = [str(Path(spec.origin).parent)]
    package.__spec__ = spec
    sys.modules["vllm"] = package
    sys.meta_path.insert(0, _Finder())
    return importlib.import_module("vllm.parser.parser_manager").ParserManager
