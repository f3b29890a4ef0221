"""The soak of an autopilot that switches: what `what-if --advise` would try is put in force under load and faults.

An autopilot draws one of its candidates, proposes it, and switches when a coordinator has written it into the plan. It
changes processes in the order of `millrace apply`: new ingresses, then coordinators, brokers and migrators one after
the other, and the old ingresses last, which end with their last stream. Any of them may be killed meanwhile, and starts
again with its new configuration.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random
from typing import Any

import msgspec
from millrace.actor.effects import Effect, PutKey
from millrace.cluster.model_folders import with_model_folders
from millrace.cluster.reading import parse_cluster
from millrace.cluster.spec import ClusterSpec
from millrace.contracts.catalog import Role
from millrace.contracts.coordinator import PlanProposed
from millrace.contracts.local import StopRequested
from millrace.contracts.message import Message
from millrace.contracts.plan import Advice, Plan
from millrace.policies.objectives import Objectives
from millrace.policies.step_bounds import StepObjectives
from millrace.sim.checkers import Checker
from millrace.sim.process import SimActor, SimProcess
from millrace.sim.runtime_sim import MILLISECOND, SECOND

from services.broker.config import BrokerConfig, TradingConfig
from services.coordinator.config import CoordinatorConfig, StagesConfig
from services.ingress.config import DispatchConfig, IngressConfig
from simulator import services
from simulator.process_restarter import WATCH_NS
from simulator.soak.cluster import SoakCluster
from simulator.soak.run import SETTLE_NS, SoakReport, SoakRun
from simulator.soak.shape import MODEL, SoakShape
from simulator.soak.trading import trading_shape
from simulator.whatif.advising import candidates
from simulator.whatif.changes import AskedChange

#: As a user would describe the cluster; the path is that of any model that ships.
CLUSTER_FILE = f"""
[[models]]
name = "{MODEL}"
path = "millrace-mini"
[[models.groups]]
count = 4
engine = "modelled"
"""

#: About what the soak's engines do under its load: steps are bounded, and stages planned, for these.
OBJECTIVES = Objectives(ttft_ms=400.0, tpot_ms=15.0, source="the soak")

#: Proposals a second, on average, while nothing is being switched.
PROPOSES_PER_S = 1.0

#: A process is ready so long after it was started, and the next one changes.
READY_NS = 200 * MILLISECOND

#: Stages are planned so often, of the requests of so long.
PLANNED_S, WINDOW_S = 1.0, 6.0


def switching_shape(seed: int) -> SoakShape:
    """The cluster of a seed: a load as brokers get it in their soak, and predictors."""
    shape = trading_shape(seed, policy="none", plan_ns=0)
    return msgspec.structs.replace(shape, policy="forecast", predictors=2)


class SwitchingCluster(SoakCluster):
    """Processes with the configuration that the cluster's file gives them.

    Attributes:
        spec: What is in force.
        leaving: Ingresses that another one replaces.
    """

    def _choose_services(self) -> None:
        self.spec = with_model_folders(parse_cluster(CLUSTER_FILE))
        self.leaving: list[SimActor] = []
        super()._choose_services()
        self.services[Role.COORDINATOR] = services.coordinator({MODEL: self.shape.step_time})

    def _add_coordinators(self) -> None:
        for index in range(self.shape.coordinators):
            self.add(Role.COORDINATOR, self._coordinator(f"coordinator-{index}"))

    def _coordinator(self, name: str) -> CoordinatorConfig:
        chosen, bounds = self.spec.policies.stages, self.spec.settings.coordinator.get("step_bounds", {})
        stages = StagesConfig(period_s=PLANNED_S, window_s=WINDOW_S, parameters=chosen.parameters)
        return msgspec.structs.replace(
            super()._coordinator(name),
            stages=msgspec.structs.replace(stages, policy=chosen.name or "one_stage"),
            step_bounds=msgspec.convert(bounds, StepObjectives),
        )

    def _ingress(self, name: str) -> IngressConfig:
        dispatch = DispatchConfig(policy=self.spec.policies.dispatch.name or "forecast")
        return msgspec.structs.replace(super()._ingress(name), dispatch=dispatch)

    def _broker(self, instance: str) -> BrokerConfig:
        chosen = self.spec.policies.trading
        trading = TradingConfig(policy=chosen.name or "none", parameters=chosen.parameters)
        return msgspec.structs.replace(super()._broker(instance), trading=trading)

    def replace_ingresses(self) -> list[SimActor]:
        """Starts others; returns those in whose place they are."""
        old = list(self.ingresses)
        for _ in old:
            self.add(Role.INGRESS, self._ingress(f"ingress-{len(self.ingresses) + len(self.leaving)}"))
        return old

    def leave(self, ingress: SimActor) -> None:
        """Ends an ingress with its last stream."""
        self.leaving.append(ingress)
        self._actors[Role.INGRESS].remove(ingress)
        self._stop_replaced(ingress)

    def _stop_replaced(self, ingress: SimActor) -> None:
        """One that was killed may be about to start again."""
        if ingress.process is not None:
            ingress.process.deliver(StopRequested(replaced=True))
        else:
            self.simulation.after(WATCH_NS, self._stop_replaced, ingress)

    def changes(self) -> list[tuple[Role, SimActor, Any]]:
        """Processes that have the policies of the file in force, with their configuration by it."""
        found: list[tuple[Role, SimActor, Any]] = []
        for actor in self.of_role(Role.COORDINATOR):
            found.append((Role.COORDINATOR, actor, self._coordinator(actor.name)))
        for worker, broker, migrator in zip(self.workers, self.of_role(Role.BROKER), self.migrators, strict=True):
            found.append((Role.BROKER, broker, self._broker(worker.name)))
            found.append((Role.MIGRATOR, migrator, self._migrator(worker.name)))
        return found


class RestlessAutopilot(Checker):
    """Proposes and switches all the time.

    Attributes:
        switched: First key of a setting -> how often it was put in force.
    """

    def __init__(self, cluster: SwitchingCluster, rng: Random, done: list[str]) -> None:
        """Args: done: gets what is done: whatever forgets is restarted, and checkers that know of no harm pause."""
        self.switched: Counter[str] = Counter()
        self._cluster, self._rng, self._done = cluster, rng, done
        self._proposed: AskedChange | None = None
        self._until_ns = 0
        self.busy = False

    def begin(self, until_ns: int) -> None:
        """Proposes from now on."""
        self._until_ns = until_ns
        self._later()

    def _later(self) -> None:
        self.busy = False
        self._cluster.simulation.after(int(self._rng.expovariate(PROPOSES_PER_S) * SECOND), self._propose)

    def _propose(self) -> None:
        simulation = self._cluster.simulation
        if self.busy or simulation.now_ns >= self._until_ns:
            return
        self._proposed = self._rng.choice(candidates(self._cluster.spec, OBJECTIVES))
        advice = Advice(settings=self._proposed.label, evidence=f"drawn at {simulation.now_ns}")
        body = PlanProposed(model=MODEL, by="autopilot", number=simulation.now_ns, advice=advice)
        simulation.publish(self._cluster.subjects.coordinate(MODEL, "propose"), body, sender="autopilot")
        simulation.after(SECOND, self._propose)  # the message, or its coordinator, may be lost

    def on_handled(self, process: SimProcess, message: Message, effects: list[Effect]) -> None:
        for effect in effects:
            plan = effect.value if isinstance(effect, PutKey) and isinstance(effect.value, Plan) else None
            asked = self._proposed
            if asked is not None and plan is not None and plan.advice and plan.advice.settings == asked.label:
                self._proposed, self.busy = None, True
                self._cluster.simulation.after(0, self._switch, asked)

    def _switch(self, asked: AskedChange) -> None:
        cluster, before = self._cluster, self._cluster.spec
        self._done.append(f"{cluster.simulation.now_ns // MILLISECOND % 1_000_000} ms: {asked.label}")
        self.switched[asked.label.partition("=")[0]] += 1
        cluster.spec = asked.spec
        old = cluster.replace_ingresses() if _dispatch(before) != _dispatch(asked.spec) else []
        changed = cluster.changes() if _others(before) != _others(asked.spec) else []
        steps = [*(partial(cluster.change, *each) for each in changed), *(partial(cluster.leave, each) for each in old)]
        for place, step in enumerate(steps, 1):
            cluster.simulation.after(place * READY_NS, step)
        cluster.simulation.after((len(steps) + 1) * READY_NS, self._later)


def _dispatch(spec: ClusterSpec) -> str:
    return spec.policies.dispatch.name or "forecast"


def _others(spec: ClusterSpec) -> object:
    return spec.policies.stages, spec.policies.trading, spec.settings.coordinator


class SwitchingRun(SoakRun):
    """Runs one seed."""

    cluster: SwitchingCluster

    def __init__(self, seed: int, *, faults: bool = True) -> None:
        super().__init__(seed, shape=switching_shape(seed), faults=faults, cluster=SwitchingCluster)
        self.autopilot = RestlessAutopilot(self.cluster, Random(f"{seed}/autopilot"), self._plan.done)
        self._sim.check_with(self.autopilot)

    def _arrive(self) -> None:
        if not self._calls:
            self.autopilot.begin(self._load_ends_ns)
        super()._arrive()

    def _serve(self) -> None:
        """Switches come to their end, and replaced ingresses too."""
        self._until(lambda: not self.autopilot.busy, SETTLE_NS, "a switch does not end")
        self._until(
            lambda: all(each.process is None for each in self.cluster.leaving), SETTLE_NS, "an old ingress is up"
        )
        super()._serve()

    def _report(self) -> SoakReport:
        return msgspec.structs.replace(super()._report(), switches=dict(self.autopilot.switched))
