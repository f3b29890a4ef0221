"""Drives one real engine from synchronous tests: its own event loop, decode to the end, stop where asked."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from millrace.actor.engine import (
    EngineEvent,
    EngineFailed,
    EngineObserved,
    EngineSequence,
    EngineStepped,
    SequenceRejected,
    StepOutput,
)
from millrace.contracts.ingress import FinishReason, TokenLogprobs
from millrace.contracts.status import EngineDescription, EngineSnapshot
from millrace.contracts.worker import Sampling

from services.worker.config import WorkerConfig
from services.worker.vllm_engine import environment
from tests.testbed.programs import output_of

environment.prepare()

#: Longest wait for anything in these tests, seconds.
PATIENCE_S = 120.0

#: Longest time without a look at what is awaited, seconds: nearly everything comes with an event.
LOOK_S = 0.05


class Decoded(msgspec.Struct):
    """Output of one sequence."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    finish: FinishReason | None = None
    first: StepOutput | None = None
    preemptions: int = 0


def config(model: Path, **fields: Any) -> WorkerConfig:
    """A small engine: float32, so that recomputing and decoding give the same tokens to the last bit that matters, and
    eager, as most are started once for a few tests; tests/engine/test_vllm_compiled.py and two_engines/ compile.
    """
    defaults: dict[str, Any] = {
        "name": "w0",
        "model": "m",
        "model_path": str(model),
        "dtype": "float32",
        "kv_bytes": 64 << 20,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 128,
        "enforce_eager": True,
    }
    return WorkerConfig(**{**defaults, **fields})


class BenchEngine:
    """A started VllmEngine with everything it said; ``with`` stops it."""

    def __init__(self, config: WorkerConfig, names: str = "r") -> None:
        from services.worker.vllm_engine.engine import VllmEngine

        self.loop = asyncio.new_event_loop()
        self.engine = VllmEngine(config)
        self.events: list[EngineEvent] = []
        self.decoded: dict[str, Decoded] = {}
        self.rejected: dict[str, str] = {}
        self.failures: list[EngineFailed] = []
        self._heard = asyncio.Event()
        self.info: EngineDescription = self.loop.run_until_complete(self.engine.start(self._hear))
        self._names = names
        self._serial = 0

    def _hear(self, event: EngineEvent) -> None:
        self.events.append(event)
        self._heard.set()
        match event:
            case EngineStepped(outputs=outputs):
                for output in outputs:
                    self._take(output)
            case SequenceRejected(sequence=sequence, detail=detail):
                self.rejected[sequence] = detail
            case EngineFailed():
                self.failures.append(event)

    def _take(self, output: StepOutput) -> None:
        decoded = self.decoded.setdefault(output.sequence, Decoded(tokens=[], logprobs=[], first=output))
        decoded.tokens += output.token_ids
        decoded.logprobs += output.logprobs or []
        decoded.finish = output.finish or decoded.finish
        decoded.preemptions = output.preemptions

    def add(self, prompt: list[int], sampling: Sampling, output: list[int] | None = None, **fields: Any) -> str:
        """Adds a sequence on the loop; returns its id, a fresh one."""
        self._serial += 1
        name = f"{self._names}{self._serial}.0"
        sequence = EngineSequence(
            sequence=name, prompt_token_ids=prompt, sampling=sampling, output_token_ids=output or [], **fields
        )
        self.bring(sequence)
        return name

    def bring(self, sequence: EngineSequence) -> None:
        """Adds a sequence that has its id."""

        async def add() -> None:
            self.engine.add(sequence)

        self.loop.run_until_complete(add())

    def cancel(self, *names: str) -> None:
        async def cancel() -> None:
            self.engine.cancel(list(names))

        self.loop.run_until_complete(cancel())

    def until(self, condition: Callable[[], bool]) -> None:
        """Runs the loop until the condition holds; fails after PATIENCE_S, and at once where the engine failed.

        Looks at each event: the engine may have no other core than this process.
        """
        process = self.engine._llm.engine_core.resources.engine_manager.processes[0]  # type: ignore[union-attr]

        async def wait() -> None:
            waited = time.monotonic() + PATIENCE_S
            while not condition():
                assert not self.failures, self.failures
                if time.monotonic() > waited:
                    pytest.fail(f"engine {process.pid} (ended: {process.exitcode}) said last: {self.events[-3:]}")
                self._heard.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._heard.wait(), LOOK_S)

        self.loop.run_until_complete(wait())

    def finish(self, *names: str) -> list[Decoded]:
        """Decodes these to their ends; fails where one is rejected."""

        def ended() -> bool:
            assert self.rejected.keys().isdisjoint(names), self.rejected
            return all(name in self.decoded and self.decoded[name].finish for name in names)

        self.until(ended)
        return [self.decoded[name] for name in names]

    def run(self, prompt: list[int], sampling: Sampling, output: list[int] | None = None) -> Decoded:
        """Decodes one sequence to its end."""
        return self.finish(self.add(prompt, sampling, output))[0]

    def rejection(self, name: str) -> str:
        """The engine's sentence about a sequence that it must refuse."""
        self.until(lambda: name in self.rejected)
        return self.rejected[name]

    def snapshot(self) -> EngineSnapshot | None:
        """The last one heard."""
        for event in reversed(self.events):
            if isinstance(event, EngineStepped | EngineObserved) and event.snapshot is not None:
                return event.snapshot
        return None

    def idle(self) -> bool:
        """Whether the last snapshot shows nothing running or waiting and every block free."""
        last = self.snapshot()
        return last is not None and not last.running and not last.waiting and last.blocks_free == last.blocks_total

    def __enter__(self) -> BenchEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.run_until_complete(self.engine.stop())
        self.loop.close()


def reference(model: Path, calls: list[tuple[list[Any], dict[str, Any]]], **engine: Any) -> list[tuple[Any, ...]]:
    """The same calls through vLLM's own ``LLM.generate``, one by one, in a process of its own. ``engine``: further
    arguments of LLM.
    """
    arguments = {
        "model": str(model),
        "dtype": "float32",
        "block_size": 32,
        "kv_cache_memory_bytes": 64 << 20,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 128,
        "enforce_eager": True,
        "disable_log_stats": True,
        "distributed_executor_backend": "uni",
        # Workers leave the choice of the backend to vLLM, which takes this one for these schemas.
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        **engine,
    }
    with tempfile.TemporaryDirectory() as folder:
        job, answers = Path(folder, "job.json"), Path(folder, "answers.json")
        job.write_text(json.dumps([arguments, calls]))
        words = [str(job), str(answers)]
        status, said = output_of("tests.testbed.vllm_reference", words, limit_s=2 * PATIENCE_S)
        assert status == 0, said[-3000:]
        return [tuple(answer) for answer in json.loads(answers.read_text())]
