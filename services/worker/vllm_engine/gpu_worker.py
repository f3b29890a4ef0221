"""The GPU worker whose V1 runner continues sequences.

Importing it needs a CUDA build of vLLM, hence a module of its own.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from services.worker.vllm_engine.kv_rank import KvRankMixin
from services.worker.vllm_engine.layout import BlockFirstMixin
from services.worker.vllm_engine.length_head_reader import LateRows, WatchedRank, WatchingMixin, on_host
from services.worker.vllm_engine.runner import ContinuingMixin, adopt


class ContinuingGPUModelRunner(WatchingMixin, ContinuingMixin, GPUModelRunner):
    """The V1 GPU runner with continuations, and with estimates from its hidden states."""

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Samples; rows of hidden states follow the output to the host."""
        reader = self.millrace_reader
        rows = self.millrace_rows() if reader is not None else None
        if reader is None or rows is None:
            return super().sample_tokens(grammar_output)
        if self.use_async_scheduling:
            rows = on_host(rows, self._get_or_create_async_output_copy_stream())
        output = super().sample_tokens(grammar_output)
        if isinstance(output, AsyncModelRunnerOutput):
            return LateRows(output, rows, reader)
        return reader.finish(rows, output)


class ContinuingGPUWorker(KvRankMixin, WatchedRank, BlockFirstMixin, Worker):
    """vLLM's GPU worker; a V2 runner stays as it is. Its KV cache is offered where vLLM put it."""

    def init_device(self) -> None:
        """Prepares the device and swaps a V1 runner's class for its continuing one."""
        super().init_device()
        adopt(self.model_runner, GPUModelRunner, ContinuingGPUModelRunner)
