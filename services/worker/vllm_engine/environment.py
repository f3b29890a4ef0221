"""Environment variables that vLLM and OpenMP read. Call ``prepare`` before the first import of torch or vLLM.

This module imports neither. OpenMP reads its thread count only when it is loaded, and two threads that spin on one
core make a step a hundred times slower.
"""

from __future__ import annotations

import importlib.metadata
import os

#: An explicit setting of the user's wins over each of these.
COMMON = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
#: For engines without a GPU.
CPU = {
    "OMP_NUM_THREADS": "1",
    # Drafting by n-grams starts numba's threads, which raise OpenMP's number to theirs for every operator.
    "NUMBA_NUM_THREADS": "1",
    # The engine's core is set by the worker (sched_setaffinity); vLLM's own binding would put every engine on the
    # same cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # AsyncLLM runs its engine core in a process of its own all the same; this lets that process hold the model
    # itself instead of starting yet another one, which saves seconds and 2 GB.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # torch would start processes that compile, in the process that engines are forked from.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    # oneDNN keeps a compiled kernel for each shape and number of tokens of a step, 1,024 by default: half a GB with
    # prompts of many lengths. This many hold every decode batch up to 64; kernels of prompts are hardly used twice.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
}


def prepare() -> None:
    """Sets the environment for vLLM in this process and its children."""
    wanted = COMMON | (CPU if _cpu_only() else {})
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def _cpu_only() -> bool:
    """Whether vLLM's CPU build is what is installed; asked without importing it."""
    try:
        importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
