"""One way to talk to every implementation of the Engine port: it is started, fed, and its events are awaited.

Not a test. The suite is synchronous, so that one engine serves all tests of a module: a real one takes long to start.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from millrace.actor.engine import (
    AddToEngine,
    CancelInEngine,
    Engine,
    EngineEvent,
    EngineFailed,
    EngineObserved,
    EngineSequence,
    EngineStepped,
    KvCommand,
    LimitStepInEngine,
    SequenceAdded,
    SequenceRejected,
    StepOutput,
)
from millrace.contracts.ingress import FinishReason, TokenLogprobs
from millrace.contracts.kv import KvEndpoint
from millrace.contracts.scheduler import scheduler_fields
from millrace.contracts.status import EngineDescription, EngineSnapshot
from millrace.contracts.worker import Sampling
from millrace.enginemodel.engine import ModelledEngine
from millrace.enginemodel.network import modelled_endpoint
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_time_models import LinearStepTime
from millrace.enginemodel.tokens import OutputLengths, Vocabulary
from millrace.sim.engine_sim import SimulatedEngine
from millrace.sim.kv_network import SimKvNetwork
from millrace.sim.process import SimProcess
from millrace.sim.runtime_sim import Simulation
from millrace.sim.stand_in import StandIn

MAX_MODEL_LEN, BLOCK_SIZE, BLOCKS_TOTAL, MAX_SEQUENCES, TOKEN_BUDGET = 256, 32, 24, 8, 64
VOCABULARY, EOS = 288, 257
WAIT_S = 60.0
#: Longest time without a look at what is awaited, seconds: nearly everything comes with an event.
LOOK_S = 0.05


class Result:
    """Output of an engine for one sequence, put together."""

    def __init__(self) -> None:
        self.added = False
        self.rejected: str | None = None
        self.outputs: list[StepOutput] = []

    @property
    def token_ids(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        return [entry for output in self.outputs for entry in output.logprobs or []]

    @property
    def finish(self) -> FinishReason | None:
        return self.outputs[-1].finish if self.outputs else None

    @property
    def over(self) -> bool:
        return self.rejected is not None or self.finish is not None


class Harness:
    """A started engine with everything that it said.

    Each implementation has its own ``put``, ``cancel``, ``move`` and ``limit``, as the port has them; ``until``, which
    waits; ``rest``, which lets a few steps' time pass; ``now_ns``; ``die``, which ends the engine by force; ``stop``.

    Attributes:
        events: In order.
        prefix: Of the names that it gives.
        promises_seeds: Whether sampling at temperature 1 with a seed is repeatable and can be continued.
    """

    promises_seeds = True

    def __init__(self) -> None:
        self.events: list[EngineEvent] = []
        self.results: dict[str, Result] = {}
        self.given: dict[str, EngineSequence] = {}
        self.info: EngineDescription
        self.prefix = "r"
        self._serial = 0

    def hear(self, event: EngineEvent) -> None:
        self.events.append(event)
        match event:
            case SequenceAdded(sequence=sequence):
                self.results[sequence].added = True
            case SequenceRejected(sequence=sequence, detail=detail):
                self.results[sequence].rejected = detail
            case EngineStepped(outputs=outputs):
                for output in outputs:
                    self.results[output.sequence].outputs.append(output)

    def add(self, prompt: list[int], *, output: list[int] | None = None, **sampling: Any) -> str:
        """Adds a sequence; greedy where ``temperature`` is not given. Returns its id."""
        self._serial += 1
        name = f"{self.prefix}{self._serial}.0"
        self.add_as(name, prompt, output=output, **sampling)
        return name

    def add_as(self, name: str, prompt: list[int], *, output: list[int] | None = None, **sampling: Any) -> None:
        self.results.setdefault(name, Result())
        sequence = EngineSequence(
            sequence=name,
            prompt_token_ids=prompt,
            sampling=Sampling(**{"max_tokens": 16, "temperature": 0.0, **sampling}),
            output_token_ids=output or [],
            arrival_ns=self.now_ns(),
        )
        self.given[name] = sequence
        self.put(sequence)

    def bring(self, sequence: EngineSequence) -> None:
        """Adds a sequence that comes from another engine."""
        self.results.setdefault(sequence.sequence, Result())
        self.given[sequence.sequence] = sequence
        self.put(sequence)

    def ask(self, command: KvCommand) -> Any:
        """Has a lease or reservation changed, and waits for the engine's answer."""
        since = len(self.events)
        self.move(command)
        self.until(lambda: bool(self._answers(command.migration, since)), f"an answer to {type(command).__name__}")
        return self._answers(command.migration, since)[0]

    def _answers(self, migration: str, since: int) -> list[EngineEvent]:
        return [event for event in self.events[since:] if getattr(event, "migration", "") == migration]

    def run(self, prompt: list[int], **options: Any) -> Result:
        """Adds a sequence and waits until it is over."""
        return self.finish(self.add(prompt, **options))

    def finish(self, name: str) -> Result:
        result = self.results[name]
        self.until(lambda: result.over, f"{name} to end")
        return result

    def snapshots(self, since: int = 0) -> list[EngineSnapshot]:
        """Snapshots told from event ``since`` on."""
        found = [event.snapshot for event in self.events[since:] if isinstance(event, EngineStepped | EngineObserved)]
        return [snapshot for snapshot in found if snapshot is not None]

    def until_idle(self) -> EngineSnapshot:
        """Waits for a snapshot of the empty engine."""
        self.until(
            lambda: any(not s.running and not s.waiting for s in self.snapshots()[-1:]), "the engine to be empty"
        )
        return self.snapshots()[-1]


class LiveHarness(Harness):
    """An Engine on an event loop, one of its own where none is given."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop | None = None) -> None:
        super().__init__()
        self.engine = engine
        self._loop = loop or asyncio.new_event_loop()
        self._heard = asyncio.Event()
        self.info = self._run(engine.start(self.hear))

    def hear(self, event: EngineEvent) -> None:
        super().hear(event)
        self._heard.set()

    def _run(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)

    def _call(self, work: Callable[[], None]) -> None:
        async def call() -> None:
            work()

        self._run(call())

    def put(self, sequence: EngineSequence) -> None:
        self._call(lambda: self.engine.add(sequence))

    def cancel(self, names: list[str]) -> None:
        self._call(lambda: self.engine.cancel(names))

    def move(self, command: KvCommand) -> None:
        self._call(lambda: self.engine.move(command))

    def limit(self, tokens: int) -> None:
        self._call(lambda: self.engine.limit_step(tokens))

    def until(self, done: Callable[[], bool], what: str) -> None:
        async def wait() -> None:
            deadline = time.monotonic() + WAIT_S
            while not done():
                assert time.monotonic() < deadline, f"waited {WAIT_S} s for {what}; last event: {self.events[-1:]}"
                self._heard.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._heard.wait(), LOOK_S)

        self._run(wait())

    def rest(self) -> None:
        self._run(asyncio.sleep(0.2))

    def now_ns(self) -> int:
        return time.time_ns()

    def die(self) -> None:
        if self.info.engine_pid:
            os.kill(self.info.engine_pid, signal.SIGKILL)
        else:
            self._call(lambda: self.engine.fail("killed by the test"))  # type: ignore[attr-defined]

    def stop(self) -> None:
        self._run(self.engine.stop())

    def close(self) -> None:
        self.stop()
        self._loop.close()


class SimulatedHarness(Harness):
    """The modelled engine behind an actor on virtual time."""

    def __init__(self, name: str = "w0", simulation: Simulation | None = None, network: SimKvNetwork | None = None):
        super().__init__()
        self.name = name
        self._simulation = simulation or Simulation(seed=1)
        self._network = network
        self._kv = None if network is None else modelled_endpoint(modelled_parameters(), key=name, model="modelled")
        self._simulation.add(lambda _: _Actor(self), node=name, accepts=(), handlers=self._handlers)
        fields = scheduler_fields(modelled_parameters())
        self.info = EngineDescription(engine="modelled", engine_version="sim", model="modelled", kv=self._kv, **fields)

    def _handlers(self, process: SimProcess) -> Any:
        engine = modelled_engine(self._kv)
        self._engine = SimulatedEngine(process, engine, snapshot_interval_ns=0, network=self._network)
        self._process = process
        return self._engine.handlers()

    def put(self, sequence: EngineSequence) -> None:
        self._engine.handlers()[AddToEngine](AddToEngine(sequence=sequence))

    def cancel(self, names: list[str]) -> None:
        self._engine.handlers()[CancelInEngine](CancelInEngine(sequences=names))

    def limit(self, tokens: int) -> None:
        self._engine.handlers()[LimitStepInEngine](LimitStepInEngine(tokens=tokens))

    def move(self, command: KvCommand) -> None:
        self._engine.handlers()[type(command)](command)

    def until(self, done: Callable[[], bool], what: str) -> None:
        deadline = self._simulation.now_ns + int(WAIT_S * 1e9)
        while not done():
            assert self._simulation.now_ns < deadline, f"waited {WAIT_S} s for {what}; last: {self.events[-1:]}"
            self._simulation.run_for(1_000_000)

    def rest(self) -> None:
        self._simulation.run_for(200_000_000)

    def now_ns(self) -> int:
        return self._simulation.now_ns

    def die(self) -> None:
        self._engine.fail()

    def stop(self) -> None:
        self._engine.paced.stop()

    def close(self) -> None:
        self.stop()


class _Actor(StandIn):
    """Hands everything to the harness."""

    def __init__(self, harness: SimulatedHarness) -> None:
        self._harness = harness
        self.name = harness.name

    def handle(self, message: Any, now_ns: int) -> list[Any]:
        self._harness.hear(message.body)
        return []


def modelled_parameters() -> EngineParameters:
    return EngineParameters(
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        blocks_total=BLOCKS_TOTAL,
        max_sequences=MAX_SEQUENCES,
        token_budget=TOKEN_BUDGET,
    )


def modelled_engine(kv: KvEndpoint | None = None) -> ModelledEngine:
    return ModelledEngine(
        modelled_parameters(),
        LinearStepTime(fixed=1_000_000, per_decode=10_000, per_prefill_token=5_000),
        vocabulary=Vocabulary(size=VOCABULARY, eos_token_id=EOS),
        lengths=OutputLengths(mean=20, sigma=0.5, length_max=60),
        kv=kv,
    )


def modelled_live(tokenizer: Path) -> Engine:
    from services.worker.modelled import ModelledConfig, ModelledLiveEngine

    lengths = OutputLengths(mean=20, sigma=0.5, length_max=60)
    return ModelledLiveEngine(
        ModelledConfig(tokenizer=str(tokenizer), speed=2.0, lengths=lengths), modelled_parameters()
    )


def vllm(model: Path, name: str) -> Engine:
    """Real vLLM in a process of its own, with random weights."""
    from services.worker.vllm_engine import environment

    environment.prepare()
    from services.worker.config import EngineKind, WorkerConfig
    from services.worker.vllm_engine.engine import VllmEngine

    config = WorkerConfig(
        name=name,
        model="tiny",
        engine=EngineKind.VLLM,
        model_path=str(model),
        dtype="float32",
        block_size=BLOCK_SIZE,
        kv_bytes=64 * 2**20,
        kv_blocks=BLOCKS_TOTAL + 1,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_SEQUENCES,
        max_num_batched_tokens=TOKEN_BUDGET,
        enforce_eager=True,
    )
    return VllmEngine(config)


class Pair:
    """Two engines that can read each other's KV; ``compares``: whether checksums are told and compared."""

    def __init__(self, source: Harness, target: Harness, *, compares: bool = True) -> None:
        self.source = source
        self.target = target
        source.prefix, target.prefix = "s", "t"  # what comes from there is told from what was here
        self.compares = compares

    def both(self) -> tuple[Harness, Harness]:
        return self.source, self.target

    def too_late(self, what: str) -> None:
        """Skips a test whose case a busy machine left no time for. Virtual time is never busy: there it fails."""
        (pytest.fail if isinstance(self.source, SimulatedHarness) else pytest.skip)(what)


@contextmanager
def simulated_pair() -> Iterator[Pair]:
    """Two modelled engines on one virtual time, with a network between them that knows the truth."""
    simulation = Simulation(seed=1)
    network = SimKvNetwork(simulation)
    source, target = (SimulatedHarness(name, simulation, network) for name in ("w0", "w1"))
    yield Pair(source, target)
    assert not network.violations
    source.close()
    target.close()


@contextmanager
def live_pair(build: Callable[[str], Engine], *, compares: bool) -> Iterator[Pair]:
    """Two engines on one event loop."""
    loop = asyncio.new_event_loop()
    source, target = (LiveHarness(build(name), loop) for name in ("source", "target"))
    yield Pair(source, target, compares=compares)
    source.stop()
    target.stop()
    loop.close()


def failures(harness: Harness) -> list[EngineFailed]:
    return [event for event in harness.events if isinstance(event, EngineFailed)]


def without_sampling_noise(entries: list[TokenLogprobs]) -> list[Any]:
    """Log-probabilities to four digits: batches of other shapes round differently in the last ones."""
    return [(entry.token_ids, [round(value, 4) for value in entry.logprobs], entry.rank) for entry in entries]
