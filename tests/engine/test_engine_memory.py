"""Memory of matrix products on a CPU: kernels for prompts of ever new lengths are given up again."""

import os
import subprocess
import sys

import pytest

from services.worker.vllm_engine import environment

pytestmark = pytest.mark.skipif(not environment._cpu_only(), reason="vLLM's build for the CPU only")

#: With this many lengths about 240 MB with the bound of `environment.py` and 560 with oneDNN's default. In float32:
#: oneDNN has no products of bf16 for processors without AVX-512.
LENGTHS = 250

#: oneDNN's variable that the environment of engines sets.
CAPACITY = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"

#: Prints the memory that products of many lengths take, MB: as engines have it, and with oneDNN's own bound. Forked, as
#: importing vLLM takes longer; oneDNN reads its variable at the first product.
_PRODUCTS = f"""
import os, random
from services.worker.vllm_engine import environment
environment.prepare()
import psutil, torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
current_platform.import_kernels()
torch.set_num_threads(1)
for capacity in (os.environ["{CAPACITY}"], "1024"):
    if os.fork():
        os.wait()
        continue
    os.environ["{CAPACITY}"] = capacity
    shapes = [(192, 320), (192, 192), (192, 1152), (576, 192)]
    layers = [(k, ops.create_onednn_mm(torch.randn(n, k, dtype=torch.float32).t(), 32)) for k, n in shapes]
    before = psutil.Process().memory_info().rss
    for length in random.Random(1).sample(range(1, 1024), {LENGTHS}):
        for k, layer in layers:
            ops.onednn_mm(layer, torch.zeros(length, k, dtype=torch.float32), None)
    print((psutil.Process().memory_info().rss - before) >> 20, flush=True)
    os._exit(0)
"""


def test_memory_levels_off_with_prompts_of_many_lengths() -> None:
    outside = {name: value for name, value in os.environ.items() if name != CAPACITY}
    command = [sys.executable, "-c", _PRODUCTS]
    done = subprocess.run(command, env=outside, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    bounded, unbounded = map(int, done.stdout.split())
    print(f"{bounded} MB, with oneDNN's own bound {unbounded} MB")
    assert bounded < 0.7 * unbounded
