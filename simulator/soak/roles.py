"""The soak of roles: flips by policy and by order, instances that come and go, brokers that trade, and faults.

Two coordinators share leases, as in a live cluster. Fences are short, so that a seed of some ten seconds sees flips,
starts and stops. Orders name instances that are not there, roles that the stage cannot spare, and older plans as well.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import msgspec
from millrace.actor.effects import Effect, Reply
from millrace.contracts.catalog import Role
from millrace.contracts.coordinator import OrderAccepted, OrderRefused, SetRole
from millrace.contracts.message import Message
from millrace.contracts.plan import InstanceRole
from millrace.policies.step_bounds import StepObjectives
from millrace.sim.checkers import Checker
from millrace.sim.checkers.roles import CapableRoles
from millrace.sim.process import SimActor, SimProcess
from millrace.sim.runtime_sim import MILLISECOND, SECOND

from services.coordinator.config import CoordinatorConfig, ProvisioningConfig, RolePolicyConfig
from services.migrator.config import MigratorConfig
from simulator import services
from simulator.cluster import BUS, CLUSTER
from simulator.host import HostShape, SimulatedHost
from simulator.soak import restless_roles
from simulator.soak.cluster import SoakCluster
from simulator.soak.run import SoakReport, SoakRun
from simulator.soak.shape import MODEL, SoakShape, TradingShape
from simulator.soak.trading import trading_shape

#: Workers that run at the beginning, and spares that provisioning may start.
WORKERS, SPARES = 4, 2

#: An operator wants something so often, on average, per second.
ORDERS_PER_S = 1.5

#: From the start of a spare to its first word.
COLD_START_NS = 800 * MILLISECOND

#: Flips are over when none has happened for so long.
QUIET_NS = 4 * SECOND

#: That must come about within this time after the load: a hop is given up after 30 s.
SETTLED_NS = 90 * SECOND

POLICIES = ("fixed", restless_roles.__file__)
ROLES: tuple[dict[str, InstanceRole], ...] = (
    {},
    {"w0": InstanceRole.PREFILL, "w1": InstanceRole.PREFILL, "w*": InstanceRole.DECODE},
)


def roles_shape(seed: int, *, policy: str = "", wrong_estimates: bool = True) -> SoakShape:
    """The cluster of a seed: one stage, brokers that trade, and roles of their own in half of the seeds."""
    rng = Random(f"{seed}/roles shape")
    shape = trading_shape(seed, policy=policy, plan_ns=0, wrong_estimates=wrong_estimates)
    assert shape.trading is not None
    assert shape.migration is not None
    trading: TradingShape = msgspec.structs.replace(shape.trading, stages_max=1)
    migration = msgspec.structs.replace(shape.migration, roles=rng.choice(ROLES))
    return msgspec.structs.replace(shape, workers=WORKERS, trading=trading, migration=migration)


def flips_for(seed: int) -> RolePolicyConfig:
    """Draw whether a seed's coordinators flip by policy; fences are short."""
    rng = Random(f"{seed}/flips")
    return RolePolicyConfig(policy=rng.choice(POLICIES), gap_s=1.0, settle_s=0.3, drain_s=1.0)


def step_bounds_for(seed: int) -> StepObjectives:
    """Draw whether a seed's coordinators bound steps in which prompts hold up decodes."""
    rng = Random(f"{seed}/step bounds")
    return StepObjectives(tpot_s=rng.choice((0.0, 0.009, 0.02)), ttft_s=rng.choice((0.01, 0.3)))


def provisioning_for(seed: int) -> ProvisioningConfig:
    """Draw whether and how a seed scales: out where requests take long, in where the load is low.

    A policy flips nothing for 30 s after a start or stop, so that two thirds of the seeds scale nothing.
    """
    rng = Random(f"{seed}/scaling")
    if rng.random() < 2 / 3:
        return ProvisioningConfig()
    parameters = {
        "threshold_s": rng.choice((0.5, 1.5)),
        "cooldown_s": 1.0,
        "instances_min": 3,
        "instances_max": WORKERS + SPARES,
        "low_utilisation": rng.choice((0.0, 0.3, 0.6)),
        "low_s": 1.0,
    }
    return ProvisioningConfig(strategy="relief", parameters=parameters, start_limit_s=10.0, drain_limit_s=1.0)


class RolesSoakCluster(SoakCluster):
    """Coordinators that flip and scale, and a host that starts and stops workers.

    Attributes:
        host: Runs the workers, and starts again those that die.
    """

    restarted_elsewhere = frozenset({Role.WORKER})

    def _choose_services(self) -> None:
        super()._choose_services()
        self.services[Role.COORDINATOR] = services.coordinator({MODEL: self.shape.step_time})

    def _add_actors(self) -> None:
        super()._add_actors()
        workers = {actor.name: actor for actor in self.workers}
        spares = tuple(f"w{WORKERS + index}" for index in range(SPARES))
        shape = HostShape(
            cluster=CLUSTER, model=MODEL, running=tuple(workers), spares=spares, cold_start_ns=COLD_START_NS
        )
        self.host = SimulatedHost(self.simulation, shape, workers=workers, add_worker=self._add_worker)

    def _add_coordinators(self) -> None:
        assert self.shape.migration is not None
        seed = self.simulation.seed
        for index in range(self.shape.coordinators):
            config = CoordinatorConfig(
                name=f"coordinator-{index}",
                bus=BUS,
                roles=self.shape.migration.roles,
                flips=flips_for(seed),
                step_bounds=step_bounds_for(seed),
                provisioning=provisioning_for(seed),
            )
            self.add(Role.COORDINATOR, config)

    def _add_worker(self, name: str) -> SimActor:
        worker = self.add(Role.WORKER, self._instance(name))
        self.add(Role.MIGRATOR, MigratorConfig(name=f"migrator-{name}", instances=[name], bus=BUS))
        self.add(Role.BROKER, self._broker(name))
        return worker

    def present_workers(self) -> list[SimActor]:
        """Those that were stopped hold nothing."""
        return [actor for actor in self.workers if actor.process is not None]


class RoleOrders(Checker):
    """An operator who wants other roles all the time.

    Attributes:
        answered: Accepted, or the reason of the refusal -> how often.
    """

    def __init__(self, cluster: RolesSoakCluster, rng: Random) -> None:
        self.answered: Counter[str] = Counter()
        self._cluster = cluster
        self._rng = rng
        self._until_ns = 0

    def begin(self, until_ns: int) -> None:
        """Gives orders from now on."""
        self._until_ns = until_ns
        self._later()

    def _later(self) -> None:
        self._cluster.simulation.after(int(self._rng.expovariate(ORDERS_PER_S) * SECOND), self._order)

    def _order(self) -> None:
        simulation, rng = self._cluster.simulation, self._rng
        if simulation.now_ns >= self._until_ns:
            return
        name = rng.choice((*(worker.name for worker in self._cluster.workers), "nobody"))
        body = SetRole(
            model=MODEL, instance=name, role=rng.choice(tuple(InstanceRole)), plan_epoch=rng.choice((0, 0, 1))
        )
        simulation.publish(
            self._cluster.subjects.coordinate(MODEL, "role"), body, sender="operator", reply_to="_INBOX.operator.1"
        )
        self._later()

    def on_handled(self, process: SimProcess, message: Message, effects: list[Effect]) -> None:
        for effect in effects:
            answer = effect.body if isinstance(effect, Reply) else None
            if isinstance(answer, OrderRefused):
                self.answered[str(answer.reason)] += 1
            elif isinstance(answer, OrderAccepted):
                self.answered["accepted"] += 1


class RolesSoakRun(SoakRun):
    """Runs one seed.

    Attributes:
        roles: Plans that coordinators wrote.
    """

    def __init__(
        self,
        seed: int,
        *,
        shape: SoakShape | None = None,
        faults: bool = True,
        rate: float = 0.0,
        cluster: type[SoakCluster] = RolesSoakCluster,
    ) -> None:
        super().__init__(seed, shape=shape or roles_shape(seed), faults=faults, rate=rate, cluster=cluster)
        assert isinstance(self.cluster, RolesSoakCluster)
        self.roles = CapableRoles(gap_ns=0)
        self.orders = RoleOrders(self.cluster, Random(f"{seed}/orders"))
        self._sim.check_with(self.roles)
        self._sim.check_with(self.orders)

    def _arrive(self) -> None:
        if not self._calls:
            self.orders.begin(self._load_ends_ns)
        super()._arrive()

    def _settle(self) -> None:
        """Flips come to an end when the load has."""
        sim, flips = self._sim, self.roles.flips

        def quiet() -> bool:
            return not flips or sim.now_ns - flips[-1][0] >= QUIET_NS

        if flips_for(sim.seed).policy == "fixed":
            self._until(quiet, SETTLED_NS, f"roles still change: {flips[-4:]}")
        self._until(self._unbounded, SETTLED_NS, "steps are still bounded")

    def _unbounded(self) -> bool:
        """Bounds of steps have ended, or expired."""
        running = [self.cluster.engines[a.name].engine for a in self.cluster.workers if a.process is not None]
        return all(engine.scheduler.token_budget == engine.parameters.token_budget for engine in running)

    def _report(self) -> SoakReport:
        report = super()._report()
        counts = dict(self.orders.answered) | {"flips": len(self.roles.flips)}
        return msgspec.structs.replace(report, roles=counts)
