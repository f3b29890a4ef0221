"""A vLLM engine in this process that is profiled: rounds of load in, time and composition of each step out.

The engine has the worker's own arguments; its scheduler keeps the time instead of writing snapshots. One process holds
everything, so that its processor time is the step's.
"""

from __future__ import annotations

import random
import time
from typing import Any

import torch
import vllm
from millrace.contracts.scheduler import scheduler_fields
from millrace.contracts.status import BatchComposition
from millrace.enginemodel.parameters import EngineParameters
from millrace.profiling.records import Profiled, Round, RoundRecord, StepRecord
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.llm_engine import LLMEngine

from services.worker.config import WorkerConfig
from services.worker.vllm_engine.scheduler_config import scheduler_config
from services.worker.vllm_engine.snapshot_scheduler import composition
from services.worker.vllm_engine.startup import engine_args

#: Ids of prompts start here: below lie special tokens.
FIRST_ID = 6


class TimingMixin(Scheduler):
    """Keeps what each step computed and how long it took."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.timed: list[StepRecord] = []
        self._under_way: list[tuple[BatchComposition, tuple[int, ...], int, int]] = []
        self._ended = (0, 0)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter_ns(), time.process_time_ns()
        output = super().schedule(*args, **kwargs)
        indices = tuple(_index(name) for name in output.num_scheduled_tokens)
        self._under_way.append((composition(output, self.requests), indices, *began))
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Takes the result, and notes the end. Where two steps overlap, the later begins when the earlier has ended."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        batch, indices, wall, cpu = self._under_way.pop(0)
        if scheduler_output.total_num_scheduled_tokens:
            ended = time.perf_counter_ns(), time.process_time_ns()
            took = ended[0] - max(wall, self._ended[0]), ended[1] - max(cpu, self._ended[1])
            self.timed.append(StepRecord(batch=batch, sequences=indices, wall_ns=took[0], cpu_ns=took[1]))
            self._ended = ended
        return outputs


class TimingScheduler(TimingMixin):
    """The plain scheduler."""


class TimingAsyncScheduler(TimingMixin, AsyncScheduler):
    """That of async scheduling."""


class VllmProfile:
    """Implements ProfilePort on an LLMEngine."""

    def __init__(self, config: WorkerConfig, hardware: str) -> None:
        arguments = engine_args(config)
        plain = current_platform.is_cpu() or config.async_scheduling is False
        arguments.scheduler_cls = f"{__name__}.{'TimingScheduler' if plain else 'TimingAsyncScheduler'}"
        arguments.enable_prefix_caching = False  # repeats of a round must compute the same
        if current_platform.is_cpu():
            torch.set_num_threads(1)
        self._engine = LLMEngine.from_engine_args(arguments)
        self._config = config
        self._hardware = hardware
        self._runs = 0
        self._vocabulary = self._engine.model_config.get_vocab_size()

    def profiled(self) -> Profiled:
        """Description of the engine that is profiled."""
        config = self._engine.vllm_config
        fields = scheduler_fields(scheduler_config(config))
        return Profiled(
            model=f"{self._config.model}, {str(config.model_config.dtype).removeprefix('torch.')}",
            hardware=self._hardware,
            engine=f"vllm {vllm.__version__} on {current_platform.device_type}",
            parameters=EngineParameters(**fields | {"prefix_caching": False}),
            steady_clock=current_platform.is_cpu(),
        )

    def run(self, load: Round) -> RoundRecord:
        """Runs one round."""
        self._runs += 1
        timed = self._engine.engine_core.engine_core.scheduler.timed
        timed.clear()
        added: list[int] = []
        while len(added) < len(load.sequences) or self._engine.has_unfinished_requests():
            while len(added) < len(load.sequences) and load.due(
                len(added), steps=len(timed), running=self._engine.get_num_unfinished_requests()
            ):
                self._add(load, len(added))
                added.append(len(timed))
            self._engine.step()
        return RoundRecord(round=load, steps=list(timed), added=added)

    def _add(self, load: Round, index: int) -> None:
        planned = load.sequences[index]
        rng = random.Random(f"{load.name} {index}")
        tokens = [rng.randrange(FIRST_ID, self._vocabulary) for _ in range(planned.prompt_tokens)]
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=planned.output_tokens)
        self._engine.add_request(f"{self._runs}.{index}", {"prompt_token_ids": tokens}, sampling)

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def _index(name: str) -> int:
    """Of a sequence within its round; vLLM appends its own suffix to names."""
    return int(name.split("-", maxsplit=1)[0].split(".")[1])
