"""A CPU engine that reads remaining lengths from hidden states, where its flags say so.

[models.groups.settings.engine_args]
worker_cls = "papers.ares.hidden_states.cpu.ReadingCPUWorker"
scheduler_cls = "papers.ares.hidden_states.estimates.EstimatingScheduler"
additional_config.ares.head = "FILE"
"""

from __future__ import annotations

from typing import Any

from papers.ares.hidden_states.reader import ReadingMixin, reader_of
from services.worker.vllm_engine.runner import ContinuingCPUModelRunner, ContinuingCPUWorker, adopt


class ReadingCPUModelRunner(ReadingMixin, ContinuingCPUModelRunner):
    """The CPU's V1 runner whose states are read before it samples."""

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Samples; the rows whose turn it is go with the output."""
        reader = self.ares_reader
        rows = self.ares_rows() if reader is not None else None
        output = super().sample_tokens(grammar_output)
        return output if reader is None or rows is None else reader.finish(rows, output)


class ReadingCPUWorker(ContinuingCPUWorker):
    """The CPU worker with that runner."""

    def init_device(self) -> None:
        super().init_device()
        adopt(self.model_runner, ContinuingCPUModelRunner, ReadingCPUModelRunner)
        self.model_runner.ares_reader = reader_of(self.vllm_config)
