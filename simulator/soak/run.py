"""One seed of the cluster simulation: random load, random harm, healing, and what must hold in the end.

Safety holds all the time: each request has at most one outcome, tokens come in order and are those of a run without
faults, one owner per epoch, bounded queues. Liveness holds after healing: every request ends, a new one is served by
every ingress, no worker holds anything, and every block is free.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from random import Random

import msgspec
from millrace.contracts.worker import Sampling
from millrace.sim.checkers.order import NoMessageAfterStop, TimeNeverGoesBack
from millrace.sim.checkers.outcomes import OneOutcome
from millrace.sim.checkers.ownership import SingleOwnership
from millrace.sim.checkers.pauses import BoundedPauses
from millrace.sim.checkers.queues import BoundedQueues
from millrace.sim.failure import SimulationFailed
from millrace.sim.links import LinkModel
from millrace.sim.runtime_sim import MILLISECOND, SECOND
from msgspec.structs import replace

from services.ingress.calls.messages import Call, CallKind
from simulator.soak.cluster import SoakCluster
from simulator.soak.fault_plan import FaultPlan
from simulator.soak.migration_load import MigrationLoad, ingress_state, watch_pauses
from simulator.soak.shape import MODEL, SoakShape
from simulator.soak.trading_watch import TradingWatch

#: Every link, but for faults: about the delays of a local network.
HEALTHY = LinkModel(jitter_ns=50_000)

#: The cluster has this long to find itself before load comes.
WARM_NS = 1500 * MILLISECOND

#: Faults end this long after the load began.
FAULTS_NS = 6 * SECOND

#: Load ends later than the faults begin to heal.
LOAD_NS = 7 * SECOND

#: After healing every open call must end within this time: their deadline and some slack.
SETTLE_NS = 70 * SECOND

#: A call to the healed cluster must complete within this time.
SERVE_NS = 15 * SECOND

#: Long calls to the healed cluster must complete within this time.
GROW_NS = 50 * SECOND

#: Workers cancel abandoned sequences within this time.
EMPTY_NS = 45 * SECOND


class SoakReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of one seed's run.

    Attributes:
        replicas: Of KV: announced, named in submissions, used by continuations; empty without.
        migrations: Outcome, or refusal where there was one -> how many ended so; empty without migrators.
        deals: Reason and outcome, or refusal -> how many deals ended so; empty without brokers.
        estimates_ignored: Estimates of rests that no sequence can have, by the workers that run in the end.
        roles: Changes of roles in plans, and what became of orders; empty without roles.
        switches: First key of a setting -> how often it was put in force; empty without an autopilot.
    """

    seed: int
    trace_hash: int
    handled: int
    virtual_s: float
    outcomes: dict[str, int]
    faults: list[str]
    restarts: int
    epochs_max: int
    migrations: dict[str, int] = {}
    replicas: dict[str, int] = {}
    deals: dict[str, int] = {}
    estimates_ignored: int = 0
    roles: dict[str, int] = {}
    switches: dict[str, int] = {}


class SoakRun:
    """Runs one seed. ``faults`` False gives the same load undisturbed; ``rate`` 0 draws one of the shape's; ``cluster``
    is what builds it.
    """

    def __init__(
        self,
        seed: int,
        *,
        shape: SoakShape | None = None,
        faults: bool = True,
        rate: float = 0.0,
        cluster: type[SoakCluster] = SoakCluster,
    ) -> None:
        self.seed = seed
        self.cluster = cluster(seed, shape or SoakShape(), link=HEALTHY)
        self.ownership = SingleOwnership()
        self.outcomes = OneOutcome()
        self._sim = self.cluster.simulation
        self._rng = Random(f"{seed}/load")
        self._rate = rate or self._rng.choice(self.cluster.shape.rates)
        self._calls = 0
        self._load_ends_ns = 0
        self._plan = FaultPlan(self.cluster, Random(f"{seed}/faults"))
        self._with_faults = faults
        self.migrations = MigrationLoad(self.cluster, Random(f"{seed}/migrations"))
        self.trading: TradingWatch | None = None
        if self.cluster.shape.trading is not None:
            self.trading = TradingWatch(self.cluster, disturbed=self._plan.disturbs)
            self._sim.check_with(self.trading)
        self.pauses: BoundedPauses | None = None
        if self.cluster.network is not None:
            self.pauses = watch_pauses(self.cluster, HEALTHY, disturbed=lambda: bool(self._plan.done))
            self._sim.check_with(self.pauses)
        shape = self.cluster.shape
        bounds = {"live": shape.engine.max_sequences + shape.queue_max, "calls_open": shape.calls_open_max}
        for checker in (
            self.ownership,
            self.outcomes,
            NoMessageAfterStop(),
            TimeNeverGoesBack(),
            BoundedQueues(bounds),
            self.migrations,
        ):
            self._sim.check_with(checker)

    def run(self) -> SoakReport:
        """Runs it to its end.

        Raises:
            SimulationFailed: something that must hold did not; the message names the seed and what was done.
        """
        try:
            self._run()
        except AssertionError as failure:
            done = "\n".join(f"  {line}" for line in self._plan.done)
            raise SimulationFailed(f"seed {self.seed}: {failure}\nfaults:\n{done}") from failure
        return self._report()

    def _run(self) -> None:
        sim = self._sim
        began_ns = sim.now_ns
        sim.run_for(WARM_NS)
        self._load_ends_ns = sim.now_ns + LOAD_NS
        self._arrive()
        if self.trading is None:  # else brokers move sequences, and nothing else moves them
            self.migrations.begin(self._load_ends_ns)
        if self._with_faults:
            self._plan.schedule(SECOND // 2, FAULTS_NS)
        sim.run_for(FAULTS_NS + SECOND)
        self._plan.heal()
        sim.run(self._load_ends_ns)
        self._until(lambda: not self.cluster.clients.open(), SETTLE_NS, "calls are still open")
        self._serve()
        self._grow()
        self._until(self._is_empty, EMPTY_NS, "workers still hold sequences or blocks")
        self._settle()
        sim.finish()
        assert sim.now_ns > began_ns
        self._check_outcomes()

    # Load

    def _arrive(self) -> None:
        if self._sim.now_ns >= self._load_ends_ns:
            return
        self._submit_somewhere()
        self._sim.after(int(self._rng.expovariate(self._rate) * SECOND), self._arrive)

    def _submit_somewhere(self) -> None:
        call = self._draw_call()
        alive = [actor.process for actor in self.cluster.ingresses if actor.process is not None]
        if not alive:
            return
        self.cluster.clients.submit(self._rng.choice(alive), call)
        if self._rng.random() < 0.08:
            delay_ns = int(self._rng.expovariate(2.0) * SECOND)
            self._sim.after(delay_ns, self.cluster.clients.abandon, call.request)

    def _draw_call(self) -> Call:
        rng = self._rng
        self._calls += 1
        prompts = [
            [rng.randrange(97, 123) for _ in range(rng.randrange(1, 90))] for _ in range(rng.choice((1, 1, 1, 2)))
        ]
        stop = [chr(rng.randrange(97, 123)) + chr(rng.randrange(97, 123))] if rng.random() < 0.3 else []
        sampling = Sampling(
            max_tokens=rng.choice(self.cluster.shape.max_tokens),
            temperature=0.0 if stop else rng.choice((0.0, 0.8)),  # what is sampled may stop anywhere
            seed=rng.choice((None, rng.getrandbits(32))),
        )
        return Call(
            request=f"r{self._calls}",
            kind=CallKind.COMPLETION,
            model=MODEL,
            prompts=prompts,
            sampling=sampling,
            n=rng.choice((1, 1, 1, 2, 3)),
            stop=stop,
            include_stop=rng.random() < 0.5,
            stream=rng.random() < 0.7,
        )

    # The end

    def _until(self, condition: Callable[[], bool], limit_ns: int, complaint: str) -> None:
        end_ns = self._sim.now_ns + limit_ns
        while not condition():
            assert self._sim.now_ns < end_ns, f"{complaint}: {self._whats_left()}"
            self._sim.run_for(100 * MILLISECOND)

    def _serve(self) -> None:
        """Every ingress is ready and serves a new call.

        One that began beside a store that had lost the plan is ready, and says so on /ready, when there is one again.
        """
        self._until(lambda: all(actor.process for actor in self.cluster.ingresses), SERVE_NS, "an ingress is down")
        views = [ingress_state(actor).cluster for actor in self.cluster.ingresses]
        self._until(
            lambda: all(view.expects(model) for view in views for model in self.cluster.models()),
            SERVE_NS,
            "an ingress is not ready",
        )
        self._complete([self._draw_call() for _ in self.cluster.ingresses], SERVE_NS)

    def _grow(self) -> None:
        """Send long calls through the stages of the healed cluster, if brokers trade there."""
        trading, longest = self.cluster.shape.trading, max(self.cluster.shape.max_tokens)
        if trading is None or not trading.growing:
            return
        self._until(lambda: not self._plan.disturbs(), SETTLE_NS, "harm does not end")
        calls = [self._draw_call() for _ in range(trading.growing)]
        long = [replace(call, sampling=replace(call.sampling, max_tokens=longest)) for call in calls]
        self._complete(long, GROW_NS)

    def _complete(self, calls: list[Call], limit_ns: int) -> None:
        """Each of these calls, divided among the ingresses, completes within that time."""
        running = [actor.process for actor in self.cluster.ingresses if actor.process is not None]
        assert running, "no ingress of the healed cluster runs"
        for process, call in zip(itertools.cycle(running), calls, strict=False):
            self.cluster.clients.submit(process, call)
        self._until(lambda: not self.cluster.clients.open(), limit_ns, "the healed cluster does not serve")
        for request in [call.request for call in calls]:
            outcome = self.cluster.clients.exchanges[request].outcome
            assert outcome == "completed", f"the healed cluster ended {request} as {outcome}"

    def _settle(self) -> None:
        """Wait for what else must come to an end; nothing here."""

    def _is_empty(self) -> bool:
        for actor in self.cluster.present_workers():
            if actor.process is None or actor.actor.snapshot()["live"]:
                return False
            scheduler = self.cluster.engines[actor.name].engine.scheduler
            if scheduler.has_work() or scheduler.pool.free != scheduler.pool.blocks_total:
                return False
        return self.migrations.is_quiet() and (self.trading is None or self.trading.is_quiet())

    def _whats_left(self) -> str:
        workers = {actor.name: actor.actor.snapshot() for actor in self.cluster.workers if actor.process is not None}
        return f"open {self.cluster.clients.open()}, workers {workers}"

    def _check_outcomes(self) -> None:
        """Check that published outcomes agree with what clients saw."""
        meanings = {"completed": "completed", "abandoned": "cancelled"}
        for request, exchange in self.cluster.clients.exchanges.items():
            published = self.outcomes.published.get(request)
            if exchange.outcome.startswith("refused"):
                allowed = self._published_of_refused()
                assert published in allowed, f"{request} was refused, and published as {published}"
            elif exchange.accepted and exchange.outcome != "connection lost":
                wanted = meanings.get(exchange.outcome, "failed")
                assert published == wanted, f"{request} ended as {exchange.outcome}, published as {published}"

    def _published_of_refused(self) -> tuple[str | None, ...]:
        """Return the outcomes that may be published for a call that its client saw refused; None: no outcome."""
        return (None,)

    def _report(self) -> SoakReport:
        sim = self._sim
        return SoakReport(
            seed=self.seed,
            trace_hash=sim.trace_hash,
            handled=sim.handled,
            virtual_s=round((sim.now_ns - 1_700_000_000 * SECOND) / SECOND, 1),
            outcomes=self.cluster.clients.outcomes(),
            faults=self._plan.done,
            restarts=self.cluster.restarts,
            migrations=self.migrations.ended,
            replicas=self.migrations.replicas,
            deals=dict(self.trading.ended) if self.trading is not None else {},
            estimates_ignored=sum(
                actor.actor.snapshot()["remaining"]["ignored"] for actor in self.cluster.workers if actor.process
            ),
            epochs_max=max((epoch for _sequence, epoch in self.ownership.owners), default=0),
        )
