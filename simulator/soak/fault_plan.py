"""Random harm of one scenario: what happens when, drawn from the seed, and healed in the end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

from millrace.contracts.catalog import Role
from millrace.contracts.local import StopRequested
from millrace.sim.kv_network import KvFaults
from millrace.sim.links import LinkModel
from millrace.sim.runtime_sim import MILLISECOND, SECOND

from simulator.soak.cluster import SoakCluster

#: Harm that one scenario takes at most.
FAULTS_MAX = 8

#: So long after healing everything has been started again and heard of, and a sequence that nobody took in the harm is
#: offered anew: brokers leave it alone for four seconds at most.
CALM_NS = 10 * SECOND


class FaultPlan:
    """Schedules faults between ``begin_ns`` and ``end_ns`` of virtual time; heal() ends whatever still lasts.

    ``done`` says what was done, for the report of a failing seed.
    """

    def __init__(self, cluster: SoakCluster, rng: Random) -> None:
        self.done: list[str] = []
        self._healed_ns: int | None = None
        self._cluster = cluster
        self._sim = cluster.simulation
        self._faults = cluster.simulation.faults
        self._rng = rng
        predictors = 2 if cluster.shape.predictors else 0  # without them the other draws stay as they were
        self._kinds: list[tuple[int, Callable[[], str]]] = [
            (6, partial(self._kill, Role.WORKER)),
            (2, partial(self._kill, Role.INGRESS)),
            (1, partial(self._kill, Role.TAGGER)),
            (2, partial(self._kill, Role.COORDINATOR)),
            (2, self._drain_worker),
            (2, self._fail_engine),
            (2, self._stall_engine),
            (4, self._partition),
            (4, self._spoil_link),
            (2, self._restart_bus),
            (predictors, partial(self._kill, Role.PREDICTOR)),
            (6 if cluster.network else 0, partial(self._kill, Role.MIGRATOR)),
            (4 if cluster.network else 0, self._spoil_reads),
            (6 if cluster.shape.trading else 0, partial(self._kill, Role.BROKER)),
            (4 if cluster.of_role(Role.JUDGE) else 0, partial(self._kill, Role.JUDGE)),
        ]

    def schedule(self, begin_ns: int, end_ns: int) -> None:
        """Draws how much happens, what, and when."""
        weights = [weight for weight, _kind in self._kinds]
        for _ in range(self._rng.randrange(FAULTS_MAX + 1)):
            kind = self._rng.choices(self._kinds, weights)[0][1]
            self._sim.after(self._rng.randrange(begin_ns, end_ns), self._do, kind)

    def heal(self) -> None:
        """The network is whole again; the supervisor restarts what is down."""
        self._healed_ns = self._sim.now_ns
        self._heal_bus()
        self._heal_reads()
        for node in self._cluster.nodes():
            self._faults.heal(node)
            self._faults.change_link(node, LinkModel(jitter_ns=50_000))

    @property
    def calm_ns(self) -> int | None:
        """Since when no harm can show any more: 0 where none was done; None while it lasts."""
        if not self.done:
            return 0
        return self._healed_ns + CALM_NS if self._healed_ns is not None else None

    def disturbs(self) -> bool:
        """Whether harm may show: brokers may have forgotten moves, and hosts be slow."""
        return self.calm_ns is None or self._sim.now_ns < self.calm_ns

    def _do(self, kind: Callable[[], str]) -> None:
        at_ms = self._sim.now_ns // MILLISECOND % 1_000_000
        self.done.append(f"{at_ms} ms: {kind()}")

    def _kill(self, role: Role) -> str:
        actor = self._rng.choice(self._cluster.of_role(role))
        self._faults.kill(actor)
        return f"kill {actor.name}"

    def _spoil_reads(self) -> str:
        network, shape = self._cluster.network, self._cluster.shape.migration
        assert network is not None
        assert shape is not None
        torn = self._rng.choice((0.0, 0.1)) if shape.verify else 0.0  # nothing but a checksum can tell
        network.faults = KvFaults(
            stall=self._rng.choice((0.0, 0.1)),
            torn=torn,
            failed=self._rng.choice((0.0, 0.2)),
            late=self._rng.choice((0.0, 0.3)),
        )
        self._sim.after(self._rng.randrange(SECOND, 4 * SECOND), self._heal_reads)
        return f"reads: {network.faults}"

    def _heal_reads(self) -> None:
        if self._cluster.network is not None:
            self._cluster.network.faults = KvFaults()

    def _drain_worker(self) -> str:
        actor = self._rng.choice(self._cluster.workers)
        if actor.process is not None:
            actor.process.deliver(StopRequested())
        return f"drain {actor.name}"

    def _fail_engine(self) -> str:
        actor = self._rng.choice(self._cluster.workers)
        if actor.process is not None:
            self._cluster.engines[actor.name].fail()
        return f"engine of {actor.name} dies"

    def _stall_engine(self) -> str:
        actor = self._rng.choice(self._cluster.workers)
        duration_ns = self._rng.randrange(100 * MILLISECOND, 5 * SECOND)
        if actor.process is not None:
            self._cluster.engines[actor.name].stall(duration_ns)
        return f"engine of {actor.name} hangs for {duration_ns // MILLISECOND} ms"

    def _partition(self) -> str:
        node = self._rng.choice(self._cluster.nodes())
        duration_ns = self._rng.choice((300 * MILLISECOND, 2 * SECOND, 6 * SECOND, 20 * SECOND))
        self._faults.partition(node)
        self._sim.after(duration_ns, self._faults.heal, node)
        return f"partition of {node} for {duration_ns // MILLISECOND} ms"

    def _spoil_link(self) -> str:
        node = self._rng.choice(self._cluster.nodes())
        model = LinkModel(
            jitter_ns=self._rng.choice((0, 200_000, 5 * MILLISECOND)),
            loss=self._rng.choice((0.0, 0.02, 0.2)),
            duplicate=self._rng.choice((0.0, 0.05, 0.3)),
            reorder=self._rng.choice((0.0, 0.05, 0.3)),
            hold_ns=self._rng.choice((2 * MILLISECOND, 50 * MILLISECOND, SECOND)),
        )
        self._faults.change_link(node, model)
        self._sim.after(self._rng.randrange(SECOND, 6 * SECOND), self._faults.change_link, node, LinkModel())
        return f"link of {node}: loss {model.loss}, duplicate {model.duplicate}, reorder {model.reorder}"

    def _restart_bus(self) -> str:
        duration_ns = self._rng.choice((200 * MILLISECOND, SECOND, 6 * SECOND))
        keep_store = self._rng.random() < 0.7
        self._faults.stop_bus(keep_store=keep_store)
        self._sim.after(duration_ns, self._heal_bus)
        return f"bus away for {duration_ns // MILLISECOND} ms, store {'kept' if keep_store else 'lost'}"

    def _heal_bus(self) -> None:
        if not self._sim.nats.up:
            self._faults.start_bus()
