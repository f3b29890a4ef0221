"""Engines that start anew one after the other, as `millrace apply` has them, while 70 % of their places are taken."""

from itertools import pairwise
from random import Random

from millrace.actor.effects import Effect
from millrace.contracts.message import Message
from millrace.contracts.worker import DrainWorker, Sampling, SubmitSequence
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_time_models import LinearStepTime
from millrace.enginemodel.tokens import OutputLengths
from millrace.sim.checkers import Checker
from millrace.sim.process import SimProcess
from millrace.sim.runtime_sim import MILLISECOND, SECOND

from services.ingress.calls.messages import Call, CallKind, DeliverDeltas
from simulator.soak.cluster import SoakCluster
from simulator.soak.shape import MODEL, MigrationShape, SoakShape

ENGINES, PLACES, STREAMS = 4, 4, 11

#: A drain may take so long, as `apply` gives it.
WITHIN_MS = 30_000


class Streams(Checker):
    """Times of deliveries by request, ns, and output tokens whose KV a continuation computed anew."""

    def __init__(self) -> None:
        self.recomputed = 0
        self.times: dict[str, list[int]] = {}

    def on_handled(self, process: SimProcess, message: Message, effects: list[Effect]) -> None:
        for effect in effects:
            body = getattr(effect, "body", None)
            if isinstance(effect, DeliverDeltas):
                self.times.setdefault(effect.request, []).append(process.now_ns)
            elif isinstance(body, SubmitSequence) and body.handover is None:
                self.recomputed += len(body.output_token_ids)

    def longest_pause_ns(self) -> int:
        return max(later - earlier for times in self.times.values() for earlier, later in pairwise(times))


class Upgrade:
    """Streams of half a minute to a minute, as many at all times, and engines that are replaced in turn."""

    def __init__(self, seed: int, *, latency_ns: int) -> None:
        shape = SoakShape(
            ingresses=1,
            workers=ENGINES,
            coordinators=1,
            engine=EngineParameters(
                max_model_len=2_048, block_size=16, blocks_total=1_024, max_sequences=PLACES, token_budget=512
            ),
            step_time=LinearStepTime(fixed=60e6, per_decode=1e6, per_prefill_token=1e4),
            lengths=OutputLengths(mean=2_000, sigma=0.01, length_max=2_040),
            call_timeout_s=600.0,
            migration=MigrationShape(verify=False, bytes_per_s=2e9, latency_ns=latency_ns, asks_per_s=0.0),
            restart_ns=(1_000 * MILLISECOND, 3_000 * MILLISECOND),
        )
        self.seen = Streams()
        self.cluster = SoakCluster(seed, shape, verify=False)
        self.simulation = self.cluster.simulation
        self.simulation.check_with(self.seen)
        self._rng, self._goes_on, self._calls = Random(seed), True, 0

    def run(self, drains: int) -> None:
        self.simulation.run_for(3 * SECOND)
        self._top_up()
        self.simulation.run_for(15 * SECOND)
        for index in range(drains):
            self._replace(index % ENGINES)
        self._goes_on = False
        while self.cluster.clients.open():
            self.simulation.run_for(SECOND)

    def _top_up(self) -> None:
        while len(self.cluster.clients.open()) < STREAMS:
            self._submit()
        if self._goes_on:
            self.simulation.after(100 * MILLISECOND, self._top_up)

    def _submit(self) -> None:
        self._calls += 1
        call = Call(
            request=f"r{self._calls}",
            kind=CallKind.COMPLETION,
            model=MODEL,
            prompts=[[self._rng.randrange(97, 123) for _ in range(200)]],
            sampling=Sampling(max_tokens=self._rng.randrange(400, 900), temperature=0.0, ignore_eos=True),
            stream=True,
        )
        ingress = self.cluster.ingresses[0].process
        assert ingress is not None
        self.cluster.clients.submit(ingress, call)

    def _replace(self, index: int) -> None:
        worker = self.cluster.workers[index]
        before, drain = worker.process, DrainWorker(limit_ms=WITHIN_MS)
        self.simulation.publish(self.cluster.subjects.engine(worker.name, "drain"), drain, sender="operator")
        while worker.process in (before, None) or worker.starting:
            self.simulation.run_for(50 * MILLISECOND)
        self.simulation.run_for(2 * SECOND)


def test_upgrades_at_seventy_percent_load_move_every_stream_with_its_kv() -> None:
    """Moves are slow: what is computed anew takes a place elsewhere as well, and the work twice."""
    upgrade = Upgrade(0, latency_ns=700 * MILLISECOND)
    upgrade.run(2 * ENGINES)
    assert set(upgrade.cluster.clients.outcomes()) == {"completed"}
    assert upgrade.seen.recomputed == 0
    assert upgrade.seen.longest_pause_ns() < 2 * SECOND
