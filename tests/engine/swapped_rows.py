"""A worker that reads hidden states in the wrong order: what a wrong reading of vLLM would be."""

from typing import Any

import msgspec

from services.worker.vllm_engine.reading import ReadingCPUModelRunner, ReadingCPUWorker


class SwappingRunner(ReadingCPUModelRunner):
    """Hands each request the state of the one after it."""

    def _millrace_provable(self, rows: Any) -> Any:
        return super()._millrace_provable(msgspec.structs.replace(rows, states=rows.states.roll(1, 0)))


class SwappingWorker(ReadingCPUWorker):
    """Installs it."""

    def init_device(self) -> None:
        super().init_device()
        self.model_runner.__class__ = SwappingRunner
