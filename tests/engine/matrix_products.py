"""Prints the memory that products of matrices of many lengths take on a CPU, MB."""

import random

import psutil
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

#: With this many about 240 MB with the bound of `environment.py` and 560 with oneDNN's default. In float32: oneDNN has
#: no products of bf16 for processors without AVX-512.
LENGTHS = 250

current_platform.import_kernels()
torch.set_num_threads(1)
shapes = [(192, 320), (192, 192), (192, 1152), (576, 192)]
layers = [(k, ops.create_onednn_mm(torch.randn(n, k, dtype=torch.float32).t(), 32)) for k, n in shapes]
before = psutil.Process().memory_info().rss
for length in random.Random(1).sample(range(1, 1024), LENGTHS):
    for k, layer in layers:
        ops.onednn_mm(layer, torch.zeros(length, k, dtype=torch.float32), None)
print((psutil.Process().memory_info().rss - before) >> 20)
