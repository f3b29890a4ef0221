"""The GPU worker whose V1 runner continues sequences.

Importing it needs a CUDA build of vLLM, hence a module of its own.
"""

from __future__ import annotations

from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from services.worker.vllm_engine.kv_rank import KvRankMixin
from services.worker.vllm_engine.layout import BlockFirstMixin
from services.worker.vllm_engine.runner import ContinuingMixin, adopt


class ContinuingGPUModelRunner(ContinuingMixin, GPUModelRunner):
    """The V1 GPU runner with continuations."""


class ContinuingGPUWorker(KvRankMixin, BlockFirstMixin, Worker):
    """vLLM's GPU worker; a V2 runner stays as it is. Its KV cache is offered where vLLM put it."""

    def init_device(self) -> None:
        """Prepares the device and swaps a V1 runner's class for its continuing one."""
        super().init_device()
        adopt(self.model_runner, GPUModelRunner, ContinuingGPUModelRunner)
