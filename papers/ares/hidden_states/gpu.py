"""The same on a GPU with the V1 runner (*read*, never run). Importing it needs a CUDA build of vLLM.

[models.groups.settings.engine_args]
worker_cls = "papers.ares.hidden_states.gpu.ReadingGPUWorker"
scheduler_cls = "papers.ares.hidden_states.estimates.EstimatingAsyncScheduler"
additional_config.ares.head = "FILE"
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput

from papers.ares.hidden_states.reader import HeadReader, ReadingMixin, Rows, reader_of
from services.worker.vllm_engine.gpu_worker import ContinuingGPUModelRunner, ContinuingGPUWorker
from services.worker.vllm_engine.runner import adopt


class LateRows(AsyncModelRunnerOutput):
    """Output of a step on a GPU, whose rows are estimated on the host when the output is there.

    Its rows were copied on the stream that vLLM copies the output by, before vLLM recorded the event that it waits for.
    """

    def __init__(self, output: Any, rows: Rows, reader: HeadReader) -> None:
        self._output, self._rows, self._reader = output, rows, reader

    def get_output(self) -> Any:
        """Waits for the output, then estimates."""
        return self._reader.finish(self._rows, self._output.get_output())

    def get_kv_connector_output(self) -> Any:
        """Asked for by vLLM 0.33 where a step failed."""
        return self._output.get_kv_connector_output()


def on_host(rows: Rows, stream: Any) -> Rows:
    """The same rows in host memory, once the work on ``stream`` is done."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        states = rows.states.to("cpu", non_blocking=True)
        logits = rows.logits.to("cpu", non_blocking=True) if rows.logits is not None else None
    for tensor in (rows.states, rows.logits):
        if tensor is not None:
            tensor.record_stream(stream)
    return msgspec.structs.replace(rows, states=states, logits=logits)


class ReadingGPUModelRunner(ReadingMixin, ContinuingGPUModelRunner):
    """Rows of hidden states follow the output to the host."""

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Samples; the rows of the step are copied on the output's stream."""
        reader = self.ares_reader
        rows = self.ares_rows() if reader is not None else None
        if reader is None or rows is None:
            return super().sample_tokens(grammar_output)
        if self.use_async_scheduling:
            rows = on_host(rows, self._get_or_create_async_output_copy_stream())
        output = super().sample_tokens(grammar_output)
        if isinstance(output, AsyncModelRunnerOutput):
            return LateRows(output, rows, reader)
        return reader.finish(rows, output)


class ReadingGPUWorker(ContinuingGPUWorker):
    """The GPU worker with that runner; a V2 runner reads nothing."""

    def init_device(self) -> None:
        super().init_device()
        adopt(self.model_runner, ContinuingGPUModelRunner, ReadingGPUModelRunner)
        if isinstance(self.model_runner, ReadingMixin):
            self.model_runner.ares_reader = reader_of(self.vllm_config)
