"""Runs one scenario from its first arrival to its last outcome."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from itertools import count, cycle
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from millrace.sim.checkers import Checker
from millrace.sim.links import LinkModel
from millrace.sim.runtime_sim import MILLISECOND, SECOND
from millrace.workloads.shape import Arrival

from simulator.scenarios.cluster import StepTimes, cluster_of
from simulator.scenarios.load import arrivals, at_model, call_of, models_of
from simulator.scenarios.observer import EngineSample, FinishedRequest, MigrationRecord
from simulator.scenarios.spec import FaultSpec, ScenarioSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from simulator.scenarios.shown_run import ShownRun

#: Virtual time between two looks at whether all is done, and two reports of progress.
LOOK_NS = SECOND

#: Outcomes on their way to the observer arrive within this time.
TAIL_NS = 100 * MILLISECOND

#: What faults of these names do.
SLOW_LINK, SLOW_WRITE_NS = LinkModel(delay_ns=50 * MILLISECOND, jitter_ns=20 * MILLISECOND), 2 * SECOND

#: Progress: calls that ended, and virtual seconds since the first possible arrival.
Progress = Callable[[int, float], None]


class ScenarioOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a scenario run.

    Attributes:
        trace_hash: Order-sensitive hash of all deliveries: equal for equal seeds.
        wall_s: Real time of the run, the building of the cluster included.
        virtual_s: Virtual time from the first possible arrival on.
        outcomes: Calls by how they ended; ``open`` for those that never did.
        details: First detail of each kind of failure.
        fallbacks: Decisions that were made without the predictions that the policy asked for.
        trades: What brokers counted, see ScenarioCluster.trades; empty without brokers.
    """

    spec: ScenarioSpec
    trace_hash: int
    messages: int
    wall_s: float
    virtual_s: float
    outcomes: dict[str, int]
    details: dict[str, str]
    fallbacks: int
    engine_steps: int
    finished: list[FinishedRequest]
    samples: list[EngineSample]
    migrations: list[MigrationRecord] = []
    trades: dict[str, int] = {}


def run_scenario(
    spec: ScenarioSpec,
    *,
    step_times: StepTimes,
    folders: Sequence[Path] = (),
    progress: Progress = lambda ended, virtual_s: None,
    clock: Callable[[], float] = float,
    checkers: Sequence[Checker] = (),
    shown: ShownRun | None = None,
) -> ScenarioOutcome:
    """Runs it.

    Args:
        step_times: Loads a step-time model by the name or path that the scenario gives.
        folders: Where traces may be.
        checkers: Look on, and fail the run where something does not hold.
        shown: A page that looks on.
        clock: Real time in seconds, to say how long it took; the default does not measure.

    Raises:
        WorkloadError: the workload's trace is wrong.
        SimulationFailed: an actor failed.
    """
    began_s = clock()
    with _without_collection():
        load = arrivals(spec.workload, seed=spec.seed, folders=folders)
        run = _Run(spec, load, step_times, shown)
        run.check_with(checkers)
        run.to_end(progress)
    return run.outcome(clock() - began_s)


class _Run:
    """One scenario under way."""

    def __init__(
        self, spec: ScenarioSpec, load: list[Arrival], step_times: StepTimes, shown: ShownRun | None = None
    ) -> None:
        self._spec = spec
        self._load = load
        self._cluster = cluster_of(spec)(
            spec,
            step_times=step_times,
            truth=self._output_tokens,
            expected=self._expected,
            harmed=shown is not None and shown.harmed,
        )
        self._sim = self._cluster.simulation
        self._shown = shown
        if shown is not None:
            shown.join(self._sim, self._cluster.subjects.cluster, self._cluster.begin_ns, self._harm)
        self._loads = spec.models()
        self._models = models_of(spec, load)
        self._max_model_len = {model: _max_model_len(spec, model) for model in self._loads}
        self._ingresses = cycle(range(spec.cluster.ingresses))
        self._numbers = count()

    def _output_tokens(self, request: str, model: str) -> int:
        return at_model(self._load[int(request[1:])].shape, self._loads[model]).output_tokens

    def _expected(self, request: str, _model: str) -> float | None:
        asked = self._load[int(request[1:])].asked
        return None if asked is None else asked.expected

    def check_with(self, checkers: Sequence[Checker]) -> None:
        for checker in checkers:
            self._sim.check_with(checker)

    def to_end(self, progress: Progress) -> None:
        sim, cluster = self._sim, self._cluster
        sim.run(cluster.begin_ns)
        for fault in self._spec.faults:
            sim.after(int(fault.at_s * SECOND), self._harm, fault)
        self._next_arrival()
        until_ns = cluster.begin_ns + self._load[-1].at_ns + int(self._spec.limit_s * SECOND)
        while cluster.clients.ended < len(self._load) and sim.now_ns < until_ns:
            sim.run_for(LOOK_NS if self._shown is None else self._shown.look_ns)
            progress(cluster.clients.ended, (sim.now_ns - cluster.begin_ns) / SECOND)
            if self._shown is not None:
                self._shown.keep_pace()
        sim.run_for(TAIL_NS)

    def _next_arrival(self) -> None:
        number = next(self._numbers)
        if number < len(self._load):
            at_ns = self._cluster.begin_ns + self._load[number].at_ns
            self._sim.after(at_ns - self._sim.now_ns, self._arrive, number)

    def _arrive(self, number: int) -> None:
        """A call reaches the next ingress that runs; without one it comes again a little later."""
        actors = self._cluster.ingresses
        process = next((p for _ in actors if (p := actors[next(self._ingresses)].process) is not None), None)
        if process is None:
            self._sim.after(100 * MILLISECOND, self._arrive, number)
            return
        workload, model, arrival = self._spec.workload, self._models[number], self._load[number]
        call = call_of(
            number,
            Arrival(arrival.at_ns, at_model(arrival.shape, self._loads[model]), arrival.asked),
            model=model,
            max_model_len=self._max_model_len[model],
            output_limit=workload.output_limit,
            stated=workload.stated,
        )
        self._next_arrival()
        self._cluster.clients.submit(process, call)

    def _harm(self, fault: FaultSpec) -> None:
        faults, sim, duration_ns = self._sim.faults, self._sim, int(fault.duration_s * SECOND)
        if fault.kind == "kill":
            faults.kill(sim.actors[fault.target])
        elif fault.kind == "slow_link":
            faults.change_link(fault.target, SLOW_LINK)
            sim.after(duration_ns, faults.change_link, fault.target, self._cluster.link_of(fault.target))
        elif fault.kind == "slow_disk":
            sim.nats.write_ns = SLOW_WRITE_NS
            sim.after(duration_ns, setattr, sim.nats, "write_ns", 0)
        elif fault.kind == "stall":
            self._cluster.engines[fault.target].stall(duration_ns)
        elif fault.kind == "partition":
            faults.partition(fault.target)
            sim.after(duration_ns, faults.heal, fault.target)
        else:
            faults.stop_bus()
            sim.after(duration_ns, faults.start_bus)

    def outcome(self, wall_s: float) -> ScenarioOutcome:
        cluster, sim = self._cluster, self._sim
        outcomes = dict(sorted(cluster.clients.outcomes.items()))
        still_open = len(self._load) - cluster.clients.ended
        return ScenarioOutcome(
            spec=self._spec,
            trace_hash=sim.trace_hash,
            messages=sim.handled,
            wall_s=wall_s,
            virtual_s=(sim.now_ns - cluster.begin_ns) / SECOND,
            outcomes={**outcomes, "open": still_open} if still_open else outcomes,
            details=cluster.clients.details,
            fallbacks=cluster.fallbacks(),
            engine_steps=sum(engine.engine.steps for engine in cluster.engines.values()),
            finished=cluster.observer.finished,
            samples=cluster.samples,
            migrations=cluster.observer.migrations,
            trades=cluster.trades(),
        )


def _max_model_len(spec: ScenarioSpec, model: str) -> int:
    return max(group.engine.max_model_len for group in spec.cluster.groups if group.model == model)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Reference counts free nearly everything here; the collector would look at it all, over and over."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            # What is left counts as old from here on, or the collector's next look would be at millions of new things.
            gc.freeze()
            gc.unfreeze()
        if was_enabled:
            gc.enable()
