"""Modelled engines with a network between them on virtual time, and the words to move sequences by hand."""

from __future__ import annotations

from typing import Any

from millrace.actor.engine import (
    EndLeaseInEngine,
    EngineEvent,
    EngineSequence,
    EngineStepped,
    FreezeInEngine,
    KvCommand,
    LeaseInEngine,
    PullIntoEngine,
    ReserveInEngine,
    SequenceAdded,
    SequenceStopped,
)
from millrace.contracts.worker import Sampling
from millrace.enginemodel.engine import ModelledEngine
from millrace.enginemodel.network import modelled_endpoint
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_time_models import LinearStepTime
from millrace.enginemodel.tokens import OutputLengths, Vocabulary
from millrace.sim.engine_sim import SimulatedEngine
from millrace.sim.kv_network import SimKvNetwork
from millrace.sim.process import SimProcess
from millrace.sim.runtime_sim import MILLISECOND, Simulation
from millrace.sim.stand_in import StandIn

from tests.testbed.move_commands import brought, handover_of, pull_of

PARAMETERS = EngineParameters(max_model_len=512, block_size=16, blocks_total=64, max_sequences=6, token_budget=128)
STEP_TIME = LinearStepTime(fixed=1e6, per_decode=1e4, per_prefill_token=5e3)


class Side:
    """One engine, and everything that it said."""

    def __init__(self, world: World, name: str, *, run_ns_max: int = 0, host: str = "", **options: Any) -> None:
        self.name = name
        self.events: list[EngineEvent] = []
        self.world = world
        self.parameters = options.pop("parameters", PARAMETERS)
        self.kv = modelled_endpoint(self.parameters, key=name, model="m", machine=host)
        self.model = ModelledEngine(
            self.parameters,
            STEP_TIME,
            vocabulary=Vocabulary(),
            lengths=OutputLengths(mean=400, sigma=0),
            kv=self.kv,
            **options,
        )
        self._run_ns_max = run_ns_max
        self.actor = world.simulation.add(lambda _: _Ear(self), node=name, accepts=(), handlers=self._handlers)

    def _handlers(self, process: SimProcess) -> Any:
        self.engine = SimulatedEngine(
            process, self.model, snapshot_interval_ns=0, run_ns_max=self._run_ns_max, network=self.world.network
        )
        return self.engine.handlers()

    def do(self, command: KvCommand) -> None:
        self.engine.paced.move(command)
        self.check()

    def ask(self, command: KvCommand) -> Any:
        """Waits for the answer."""
        since = len(self.events)
        self.do(command)
        return self.answer(command.migration, since)

    def answer(self, migration: str, since: int) -> Any:
        for _ in range(5_000):
            for event in self.events[since:]:
                if getattr(event, "migration", "") == migration:
                    return event
            self.world.run(0.2)
        raise AssertionError(f"no answer about {migration}")

    def add(self, name: str, prompt: list[int], **sampling: Any) -> EngineSequence:
        sequence = EngineSequence(
            sequence=name,
            prompt_token_ids=prompt,
            sampling=Sampling(**{"max_tokens": 60, "temperature": 0.0, **sampling}),
        )
        self.engine.paced.add(sequence)
        self.check()
        return sequence

    def said(self, name: str) -> list[int]:
        steps = [event for event in self.events if isinstance(event, EngineStepped)]
        return [token for step in steps for out in step.outputs if out.sequence == name for token in out.token_ids]

    def finished(self, name: str) -> bool:
        steps = [event for event in self.events if isinstance(event, EngineStepped)]
        return any(out.finish for step in steps for out in step.outputs if out.sequence == name)

    def has(self, name: str) -> bool:
        return any(isinstance(event, SequenceAdded) and event.sequence == name for event in self.events)

    def check(self) -> None:
        """Every block is accounted for (the paced engine may be in the middle of a run, which counts at its end)."""
        self.model.check_invariants()

    # The steps of a move

    def lease(self, name: str, migration: str, from_block: int = 0) -> Any:
        return self.ask(LeaseInEngine(migration=migration, sequence=name, from_block=from_block))

    def freeze(self, name: str, migration: str, from_block: int = 0) -> Any:
        return self.ask(FreezeInEngine(migration=migration, sequence=name, from_block=from_block))

    def end(self, migration: str, *, moved: bool) -> None:
        self.do(EndLeaseInEngine(migration=migration, moved=moved))

    def reserve(self, source: Side, name: str, migration: str, token_ids: list[int], blocks: int) -> Any:
        command = ReserveInEngine(
            migration=migration, sequence=name, endpoint=source.kv, token_ids=token_ids, blocks=blocks
        )
        return self.ask(command)

    def pull_of(self, leased: Any, *, within_ms: float = 2_000) -> PullIntoEngine:
        return pull_of(leased, until_ns=self.world.simulation.now_ns + int(within_ms * MILLISECOND))

    def bring(self, given: EngineSequence, stopped: SequenceStopped, source: Side, *, read_ms: int = 2_000) -> None:
        self.engine.paced.add(brought(given, stopped, handover_of(stopped, source.kv, read_ms=read_ms)))
        self.check()


class World:
    """Virtual time and the network."""

    def __init__(self, seed: int = 1, **network: Any) -> None:
        self.simulation = Simulation(seed)
        self.network = SimKvNetwork(self.simulation, **network)

    def run(self, ms: float) -> None:
        self.simulation.run_for(int(ms * MILLISECOND))

    def until(self, done: Any, *, ms_max: float = 60_000) -> None:
        waited = 0.0
        while not done():
            assert waited < ms_max, "waited in vain"
            self.run(0.5)
            waited += 0.5


class _Ear(StandIn):
    """Hears what the engine says."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self.name = side.name

    def handle(self, message: Any, now_ns: int) -> list[Any]:
        self._side.events.append(message.body)
        return []
