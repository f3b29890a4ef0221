"""KV replicas in simulated clusters: a continuation begins on the replica, and replicas give way to everything else."""

from typing import Any

import pytest
from millrace.actor.effects import Effect, Log, Publish, Request
from millrace.contracts.message import Message
from millrace.contracts.migration import KvReplicated
from millrace.contracts.worker import Sampling, SubmitSequence
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.tokens import OutputLengths
from millrace.sim.checkers import Checker
from millrace.sim.faults import Faults
from millrace.sim.process import SimActor, SimProcess
from millrace.sim.runtime_sim import MILLISECOND, SECOND

from services.ingress.calls.messages import Call, CallKind
from simulator.soak.cluster import SoakCluster
from simulator.soak.shape import MODEL, MigrationShape, SoakShape

BLOCK = 16
PROMPT = 200
OUTPUT = 600


def shape(*, blocks: int = 200, workers: int = 3) -> SoakShape:
    engine = EngineParameters(
        max_model_len=1024, block_size=BLOCK, blocks_total=blocks, max_sequences=6, token_budget=96
    )
    return SoakShape(
        ingresses=1,
        workers=workers,
        coordinators=1,
        engine=engine,
        lengths=OutputLengths(mean=OUTPUT, sigma=0.01, length_max=700),
        migration=MigrationShape(replicas=True, verify=False),
        restart_ns=(20 * SECOND, 21 * SECOND),
    )


class Said(Checker):
    """Messages of ingress and migrators about replicas."""

    def __init__(self) -> None:
        self.replicated: list[KvReplicated] = []
        self.submitted: list[SubmitSequence] = []
        self.continued: list[dict[str, Any]] = []

    def on_handled(self, process: SimProcess, message: Message, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Publish(body=KvReplicated() as body):
                    self.replicated.append(body)
                case Request(body=SubmitSequence() as body):
                    self.submitted.append(body)
                case Log(event="continued_on_replica", fields=fields):
                    self.continued.append(fields)

    def holder(self, sequence: str) -> str:
        told = [body for body in self.replicated if body.sequence == sequence]
        return told[-1].instance if told and told[-1].tokens else ""


class Running:
    """A cluster with calls under way."""

    def __init__(self, the_shape: SoakShape, *, seed: int = 1) -> None:
        self.cluster = SoakCluster(seed, the_shape)
        self.sim = self.cluster.simulation
        self.said = Said()
        self.sim.check_with(self.said)
        self.faults = Faults(self.sim, self.cluster.nodes())
        self.calls = 0
        self.sim.run_for(1_500 * MILLISECOND)

    def submit(self, *, prompt: int = PROMPT, output: int = OUTPUT) -> str:
        self.calls += 1
        request = f"r{self.calls}"
        call = Call(
            request=request,
            kind=CallKind.COMPLETION,
            model=MODEL,
            prompts=[[97 + (self.calls + index) % 26 for index in range(prompt)]],
            sampling=Sampling(max_tokens=output, temperature=0.8),
            stream=True,
        )
        process = self.cluster.ingresses[0].process
        assert process is not None
        self.cluster.clients.submit(process, call)
        return request

    def owner(self, request: str) -> SimActor:
        state = self.cluster.ingresses[0].actor.snapshot()["sequences"][f"{request}.0"]
        return next(actor for actor in self.cluster.workers if actor.name == state["instance"])

    def log(self, request: str) -> list[int]:
        state = self.cluster.ingresses[0].actor.snapshot()["sequences"].get(f"{request}.0")
        return state["log"] if state else []

    def until(self, condition: Any, limit_ns: int = 30 * SECOND) -> None:
        end_ns = self.sim.now_ns + limit_ns
        while not condition():
            assert self.sim.now_ns < end_ns
            self.sim.run_for(10 * MILLISECOND)

    def figures(self, name: str) -> dict[str, Any]:
        return next(actor for actor in self.cluster.workers if actor.name == name).actor.snapshot()["figures"]

    def worker(self, name: str) -> SimActor:
        return next(actor for actor in self.cluster.workers if actor.name == name)

    def end(self) -> None:
        """Every call completes with the right text, and every block is free."""
        self.until(lambda: not self.cluster.clients.open())
        assert set(self.cluster.clients.outcomes()) == {"completed"}
        self.until(self.is_empty)
        self.sim.finish()

    def is_empty(self) -> bool:
        engines = [self.cluster.engines[actor.name].engine for actor in self.cluster.workers if actor.process]
        assert not any(engine.moves.arrivals.poisoned for engine in engines)
        return all(engine.scheduler.pool.free == engine.scheduler.pool.blocks_total for engine in engines)


@pytest.fixture
def running() -> Running:
    return Running(shape())


def test_a_continuation_on_the_holder_computes_the_tail_only(running: Running):
    request = running.submit()
    running.until(lambda: len(running.log(request)) > 120)
    holder, source = running.said.holder(f"{request}.0"), running.owner(request)
    assert holder not in ("", source.name)
    running.faults.kill(source)
    running.until(lambda: bool(running.said.continued))
    (continued,) = running.said.continued
    assert continued["to"] == holder
    assert continued["kv_tokens"] % BLOCK == 0
    # A round each 100 ms, of some 9 ms per token, and the answers: the lag is at most two dozen tokens and a block.
    assert 0 < continued["tokens"] - continued["kv_tokens"] <= 24 + BLOCK
    assert running.figures(holder)["replicas_missed"] == 0
    running.end()


def test_after_the_holder_died_the_replica_is_made_elsewhere(running: Running):
    request = running.submit()
    running.until(lambda: bool(running.said.holder(f"{request}.0")))
    first = running.said.holder(f"{request}.0")
    running.faults.kill(running.worker(first))
    running.until(lambda: running.said.holder(f"{request}.0") not in ("", first))
    source = running.owner(request)
    running.faults.kill(source)
    running.until(lambda: bool(running.said.continued))
    assert running.said.continued[0]["to"] not in (first, source.name)
    running.end()


def test_replicas_give_way_to_sequences_that_need_blocks():
    running = Running(shape(blocks=70, workers=2))
    request = running.submit()
    running.until(lambda: bool(running.said.holder(f"{request}.0")))
    holder = running.said.holder(f"{request}.0")
    pool = running.cluster.engines[holder].engine.scheduler.pool
    more = [running.submit(prompt=240, output=200) for _ in range(6)]
    running.until(lambda: any(running.log(each) and running.owner(each).name == holder for each in more))
    running.end()
    preempted = sum(running.cluster.engines[a.name].engine.scheduler.preemptions for a in running.cluster.workers)
    assert pool.free == pool.blocks_total
    assert preempted, "without preemptions memory was never short, and nothing had to give way"


def test_an_ended_sequence_leaves_no_replica(running: Running):
    request = running.submit()
    running.until(lambda: bool(running.said.holder(f"{request}.0")))
    holder = running.said.holder(f"{request}.0")
    running.until(lambda: not running.cluster.clients.open())
    ended_ns = running.sim.now_ns
    running.until(running.is_empty)
    assert running.sim.now_ns - ended_ns < SECOND, "freed by ingress, not by the deadline"
    assert not running.cluster.engines[holder].engine.scheduler.replicas
    running.end()


def test_a_draining_source_is_continued_on_the_replica_as_well(running: Running):
    request = running.submit()
    running.until(lambda: len(running.log(request)) > 60)
    holder, source = running.said.holder(f"{request}.0"), running.owner(request)
    running.cluster.engines[source.name].fail("killed by the test")
    running.until(lambda: bool(running.said.continued))
    assert running.said.continued[0]["to"] == holder
    running.end()
