"""Migrations for the soak: sequences are ordered to move all the time, and what must hold when they do.

A seed draws whether checksums travel and which roles the workers have; then sequences move at random: one, several at
once, all of an instance; to a named target or to wherever there is room; now and then one that is not there. Together
with the other checkers (one owner per epoch, exact tokens, one outcome) this one holds: no engine decodes from blocks
that were not the sequence's when they were read, whether or not checksums travel, and in the end no lease, reservation
or migration is left anywhere.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from millrace.actor.effects import Effect, Log, Publish, Request
from millrace.contracts.message import Message
from millrace.contracts.migration import (
    EvacuateInstance,
    KvReplicated,
    MigrateSequence,
    MigrationFinished,
    MigrationMode,
)
from millrace.contracts.plan import InstanceRole
from millrace.contracts.status import BatchComposition
from millrace.contracts.worker import SubmitSequence
from millrace.enginemodel.network import TOKEN_BYTES
from millrace.sim.checkers import Checker
from millrace.sim.checkers.pauses import JITTERS, BoundedPauses, PauseBounds
from millrace.sim.links import LinkModel
from millrace.sim.process import SimActor, SimProcess
from millrace.sim.runtime_sim import MILLISECOND, Simulation
from msgspec.structs import replace

from services.ingress.config import IngressConfig
from services.ingress.times import PROBE_NS, RECONNECT_GRACE_NS, RESEND_TIMEOUT_NS, Times
from services.migrator.config import MigratorLimits
from services.worker.config import MigrationConfig
from simulator.soak.shape import REPLICAS_IN_MAX, REPLICAS_OUT_MAX, MigrationShape

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulator.soak.cluster import SoakCluster
    from simulator.soak.shape import SoakShape

#: Roles that a seed may give to the workers; the first is drawn more often than the others.
ROLES: tuple[dict[str, InstanceRole], ...] = (
    {},
    {},
    {"w0": InstanceRole.PREFILL, "w1": InstanceRole.DECODE},
    {"w0": InstanceRole.PREFILL, "w*": InstanceRole.DECODE},
)


def migration_for(seed: int) -> MigrationShape:
    """Draw how sequences move in a seed's cluster."""
    rng = Random(f"{seed}/migration shape")
    shape = MigrationShape(
        verify=rng.random() < 0.5,
        roles=rng.choice(ROLES),
        bytes_per_s=rng.choice((50e3, 2e6, 12.5e9)) * 1e3,
        latency_ns=rng.choice((10_000, 300_000, 5_000_000)),
        replicas=rng.random() < 0.5,
    )
    # Where everything moves all the time few replicas live long enough to be of use.
    return replace(shape, asks_per_s=rng.choice((1.0, 12.0))) if shape.replicas else shape


def pause_bounds(shape: SoakShape, link: LinkModel) -> PauseBounds:
    """Return the bounds on a client's wait where sequences move, from the configurations of all participants."""
    assert shape.migration is not None
    engine, limits, times = shape.engine, MigratorLimits(), Times(IngressConfig(name="any"))
    silence_ns = IngressConfig().membership.instance_silence_ns
    budget, tokens = engine.token_budget, engine.max_sequences * engine.max_model_len
    fullest = BatchComposition(decodes=engine.max_sequences, prefill_tokens=budget, context_tokens=tokens)
    step_ns = shape.step_time.duration_ns(fullest)
    freeze_ns = MigrationConfig().freeze_ms_max * MILLISECOND
    beside = (REPLICAS_OUT_MAX, REPLICAS_IN_MAX) if shape.migration.replicas else (0, 0)
    moves = MigrationConfig()
    reads_max = max(moves.leases_max + beside[0], moves.reservations_max + beside[1])
    elsewhere_ns = silence_ns + RECONNECT_GRACE_NS + PROBE_NS + RESEND_TIMEOUT_NS + times.stall
    return PauseBounds(
        message=2 * (link.delay_ns + JITTERS * link.jitter_ns),
        step=step_ns,
        recompute=-(-tokens // (budget - engine.max_sequences)) * step_ns,
        latency=shape.migration.latency_ns,
        bytes_per_s=shape.migration.bytes_per_s / reads_max,
        block_bytes=engine.block_size * TOKEN_BYTES,
        freeze_max=freeze_ns,
        harm=freeze_ns + limits.lease_ms * MILLISECOND + elsewhere_ns,
    )


def watch_pauses(cluster: SoakCluster, link: LinkModel, disturbed: Callable[[], bool]) -> BoundedPauses:
    """The checker of a cluster that has migrators."""

    def ingresses() -> dict[str, Any]:
        return {actor.name: ingress_state(actor) for actor in cluster.ingresses if actor.process is not None}

    def engines() -> dict[str, Any]:
        here = [actor.name for actor in cluster.workers if actor.process is not None]
        return {name: cluster.engines[name].engine for name in here}

    return BoundedPauses(pause_bounds(cluster.shape, link), ingresses=ingresses, engines=engines, disturbed=disturbed)


def ingress_state(actor: SimActor) -> Any:
    """State of an ingress whose process runs."""
    return actor.actor.state  # type: ignore[attr-defined]


class MigrationLoad(Checker):
    """Asks for migrations, and looks on.

    Attributes:
        ended: Outcome, with the refusal where there was one -> how many migrations ended so.
        replicas: ``told`` to ingresses, ``named`` in submissions, ``used`` by continuations -> how many.
    """

    def __init__(self, cluster: SoakCluster, rng: Random) -> None:
        self.ended: dict[str, int] = {}
        self.replicas: dict[str, int] = {}
        self._cluster = cluster
        self._rng = rng
        self._until_ns = 0
        wire = cluster.shape.migration
        self._asks_per_s = wire.asks_per_s if wire is not None else 0.0

    def begin(self, until_ns: int) -> None:
        """Asks from now on; does nothing in a cluster without migrators."""
        self._until_ns = until_ns
        if self._cluster.network is not None:
            self._arrive()

    def _arrive(self) -> None:
        simulation = self._cluster.simulation
        if simulation.now_ns >= self._until_ns:
            return
        self._ask()
        simulation.after(int(self._rng.expovariate(self._asks_per_s) * 1000) * MILLISECOND, self._arrive)

    def _ask(self) -> None:
        rng, cluster = self._rng, self._cluster
        source = rng.choice(cluster.workers)
        if rng.random() < 0.03:
            self._tell(source.name, "evacuate", EvacuateInstance(limit_ms=rng.choice((200, 3_000))))
            return
        running = list(source.actor.snapshot()["sequences"]) if source.process is not None else []
        wanted = rng.sample(running, min(len(running), rng.choice((1, 1, 1, 2, 6)))) or ["nobody.0"]
        mode = rng.choice((None, None, None, None, MigrationMode.STOP_AND_COPY, MigrationMode.RECOMPUTE))
        for sequence in wanted:
            target = rng.choice(("", *(worker.name for worker in cluster.workers)))
            self._tell(source.name, "start", MigrateSequence(sequence=sequence, target=target, mode=mode))

    def _tell(self, instance: str, verb: str, body: MigrateSequence | EvacuateInstance) -> None:
        subject = self._cluster.subjects.migrate(instance, verb)
        self._cluster.simulation.publish(subject, body, sender="somebody")

    # What must hold

    def on_handled(self, process: SimProcess, message: Message, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Publish) and isinstance(effect.body, MigrationFinished):
                body = effect.body
                how = f"{body.outcome} {body.refusal}" if body.refusal else str(body.outcome)
                self.ended[how] = self.ended.get(how, 0) + 1
            elif what := _of_replica(effect):
                self.replicas[what] = self.replicas.get(what, 0) + 1

    def on_interval(self, simulation: Simulation) -> None:
        if self._cluster.network is not None:
            for name, engine in self._cluster.engines.items():
                poisoned = engine.engine.moves.arrivals.poisoned
                assert not poisoned, f"{name} decoded {poisoned} from what was not their KV"

    def is_quiet(self) -> bool:
        """Whether no lease, reservation or migration is left."""
        for worker in self._cluster.present_workers():
            moves = self._cluster.engines[worker.name].engine.moves
            if len(moves.leases) or len(moves.arrivals):
                return False
        if self._cluster.network is None:
            return True
        migrators = self._cluster.migrators
        return all(m.process is not None and not m.actor.snapshot()["out"] for m in migrators)


def _of_replica(effect: Effect) -> str:
    """Text of an effect about a KV replica; empty for none."""
    match effect:
        case Publish(body=KvReplicated(tokens=tokens)) if tokens:
            return "told"
        case Request(body=SubmitSequence(replica=replica)) if replica:
            return "named"
        case Log(event="continued_on_replica"):
            return "used"
        case _:
            return ""
