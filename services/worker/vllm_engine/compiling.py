"""torch.compile in an engine: whether it can run here, and a compile cache that later engines find.

vLLM keeps what it compiled under ``VLLM_CACHE_ROOT``, by a hash of its configuration and of the sources. On a CPU its
loader expects a method that only its own backend has, so that it would compile again at each start.
"""

from __future__ import annotations

import logging
import os
import shutil
import sysconfig
from collections import UserDict
from pathlib import Path
from typing import Any

import torch
from torch._inductor import codecache, cpu_vec_isa
from vllm import envs
from vllm.compilation import decorators
from vllm.compilation.compiler_interface import get_inductor_factors
from vllm.v1.sample import sampler

logger = logging.getLogger(__name__)

#: As torch's inductor looks for one where ``CXX`` names none.
COMPILERS = ("g++", "clang++")


class EngineSettings(UserDict[str, Any]):
    """``additional_config`` of an engine. None of it changes what is compiled, so that it adds nothing to the hash."""

    def compute_hash(self) -> str:
        """The same for all; vLLM would hash paths that differ with each start."""
        return "millrace"


def why_eager() -> str:
    """Reasons why a CPU engine cannot compile here; empty where it can."""
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "TORCHDYNAMO_DISABLE is set"
    named = os.environ.get("CXX")
    if not any(map(shutil.which, [named] if named else COMPILERS)):
        return f"no C++ compiler ({named or ' or '.join(COMPILERS)})"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "no Python.h (package python3-dev)"
    return ""


def preload() -> None:
    """Works out once what each forked engine would: hashes of torch's sources, instruction sets that compile here."""
    if not why_eager():
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(envs.VLLM_CACHE_ROOT, "inductor")))
        get_inductor_factors()
        cpu_vec_isa.VecISA._probe_load = _probe_once
        cpu_vec_isa.pick_vec_isa()


_probe = cpu_vec_isa.VecISA._probe_load


def _probe_once(isa: cpu_vec_isa.VecISA, path: str) -> bool:
    """Torch's trial of a file compiled for an instruction set, 0.3 s: once, as its versions are in the file's name."""
    loads = Path(f"{path}.loads")
    if not loads.exists() and _probe(isa, path):
        loads.touch()
    return loads.exists()


def prepare() -> None:
    """Repairs the loader, and leaves the sampler uncompiled: it would hold up every request when the first one asks for
    log-probabilities. Idempotent.
    """
    decorators._try_load_aot_compiled_fn = _load
    counting = sampler.batched_count_greater_than
    sampler.batched_count_greater_than = getattr(counting, "_torchdynamo_orig_callable", counting)


_load_in_vllm = decorators._try_load_aot_compiled_fn


def _load(model: Any, path: str) -> Any:
    """VLLM's loader, with the method that it misses on inductor's functions, and without inductor's precompiled header:
    to see whether that is current takes a run of the preprocessor, and kernels that are loaded need none.
    """
    load, precompile = torch.compiler.load_compiled_function, codecache._precompile_header

    def load_finished(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        compiled = loaded._artifacts.compiled_fn
        if not hasattr(compiled, "finalize_loading"):
            compiled.finalize_loading = lambda config: None
        return loaded

    torch.compiler.load_compiled_function, codecache._precompile_header = load_finished, lambda *_, **__: ""
    try:
        found = _load_in_vllm(model, path)
    finally:
        torch.compiler.load_compiled_function, codecache._precompile_header = load, precompile
    if found is None:
        logger.warning("compiles the model: the first start with these settings; later ones load what it makes")
    return found
