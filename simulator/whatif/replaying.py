"""From a recorded load to scenarios: the cluster as it was, with step times and message times fitted to the recording,
and as it would be with a change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from millrace.cluster.engine_limits import engine_parameters, step_time_of
from millrace.cluster.spec import ClusterSpec, GroupSpec, ModelSpec
from millrace.cluster.workers import workers_of
from millrace.contracts.status import InstanceRecord
from millrace.enginemodel.coefficients import load_step_time
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.registered import load_step_times, scheduler_parameters
from millrace.enginemodel.step_time_models import LinearStepTime
from millrace.supervision.service_fields import STEP_TIMES, merged, step_time_files
from millrace.workloads.recording import RecordedLoad, RequestServed, slow_request_ns

from simulator.scenarios.cluster_file import cluster_tables
from simulator.scenarios.observer import FinishedRequest
from simulator.scenarios.reading import ScenarioError, scenario_of
from simulator.scenarios.running import run_scenario
from simulator.scenarios.spec import ScenarioSpec
from simulator.scenarios.statistics import last_samples
from simulator.whatif.step_fit import computed, fit, slowdown

if TYPE_CHECKING:
    from simulator.scenarios.shown_run import ShownRun

#: Step times fitted to recorded engines are called so, with their kind behind.
FITTED = "fitted:"

#: Requests that the level of step times and message times is fitted to, and times that this is repeated at most. One
#: that changes less than LEVELLED is the last. Slower engines have larger batches, so that latencies follow step times
#: more than in proportion: later rounds take factors to this power.
FITTED_REQUESTS = 2_000
ROUNDS, LEVELLED, DAMPED = 4, 0.02, 0.7

#: The round with the least error is taken: that of TPOT and, with this weight, that of TTFT, which queues make larger
#: than in proportion. By TPOT alone a cluster past its knee is fitted to engines so fast that nobody waits.
TTFT_WEIGHT = 0.5

#: Bounds of the factor by which one round changes step times.
FACTOR_MIN, FACTOR_MAX = 0.5, 2.0

#: Snapshots and summaries of all instances in a replay, and bounds of the pause between two of one instance, ms. Live
#: ones come each 20 and 25 ms; in a long replay they would take most of its time.
REPORTS_MAX = 30_000
REPORT_MS_MIN, REPORT_MS_MAX = 25, 250

#: Longest time of a message that may be fitted, us. First tokens that come later have another cause (processes that get
#: no core), and instances whose every message comes later would pass for dead.
WORKER_US_MAX = 50_000.0

#: Stages are planned so often in a replay at least: a live plan is half a minute old before there is another.
PLANNINGS_MIN = 20

#: Messages that a worker sends or gets from a request's placement until its first token.
WORKER_HOPS = 2


class FittedCluster(msgspec.Struct, frozen=True, kw_only=True):
    """The recorded cluster, fitted.

    Attributes:
        spec: Its file; models are folders.
        records: Of its instances.
        kinds: Of those: the model, with the group's number where it has several groups.
        models: Step times of each kind.
        named: Set that instances of each kind name, where it can be read: forecasts begin from it, not from the fit.
        slowdowns: By each neighbour that computes, by model.
        worker_us: Of a message to or from a worker, beyond the network's.
        intervals: That step times were fitted to.
    """

    spec: ClusterSpec
    records: dict[str, InstanceRecord] = {}
    kinds: dict[str, str] = {}
    models: dict[str, LinearStepTime] = {}
    named: dict[str, str] = {}
    slowdowns: dict[str, float] = {}
    worker_us: float = 0.0
    intervals: int = 0

    def table(self, spec: ClusterSpec) -> dict[str, Any]:
        """Tables of a scenario on this cluster, or on one with changes."""
        tables = cluster_tables(spec, partial(self._engine, spec))
        for group in tables["cluster"]["groups"]:
            group["neighbour_slowdown"] = self.slowdowns.get(group["model"], 0.0)
            group["host"] = "recorded" if group["neighbour_slowdown"] else ""
            if group["step_time"].startswith(FITTED):
                group["told_step_time"] = self.named.get(group["step_time"].removeprefix(FITTED), "")
        return merged(tables, {"network": {"worker_delay_us": self.worker_us}})

    def _engine(self, spec: ClusterSpec, model: ModelSpec, group: GroupSpec) -> tuple[EngineParameters, str]:
        """As the instances registered themselves, with what the changed file says otherwise."""
        wanted = engine_parameters(spec, model, group)
        known = self._known(model, group)
        record = next((self.records[name] for name in known if name in self.records), None)
        before = next((m, g) for m in self.spec.models for g in m.groups if m.name == model.name) if known else None
        named = step_time_of(spec, group) or STEP_TIMES.get(Path(model.path).name, "")
        if record is None or before is None:
            if not named:
                raise ScenarioError(f"group {group.name} of model {model.name}: nothing recorded, and no step_time")
            return wanted, named
        was = engine_parameters(self.spec, *before)
        changed = {
            field: getattr(wanted, field)
            for field in wanted.__struct_fields__
            if getattr(wanted, field) != getattr(was, field)
        }
        own = scheduler_parameters(record, prefix_caching=True)
        other = named != (step_time_of(self.spec, before[1]) or STEP_TIMES.get(Path(before[0].path).name, ""))
        step_time = named if other and named else f"{FITTED}{self.kinds[record.instance]}"
        return msgspec.structs.replace(own, **changed), step_time

    def _known(self, model: ModelSpec, group: GroupSpec) -> list[str]:
        """Recorded instances that tell of a group's: its own first, then others of its model."""
        slots = [slot for slot in workers_of(self.spec) if slot.model.name == model.name]
        own = [name for slot in slots if slot.group == group for name in slot.instances]
        named = [name for slot in slots if slot.group.name == group.name for name in slot.instances]
        return [*own, *named, *(name for name, record in self.records.items() if record.model == model.name)]

    def step_time(self, name: str) -> LinearStepTime:
        """Loads step times by the name that ``table`` gives."""
        return self.models[name.removeprefix(FITTED)] if name.startswith(FITTED) else load_step_time(name)


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """One replay.

    Attributes:
        finished: By number of the request in the load.
        batch: Sequences in the running batch of a busy instance, on average.
        waiting: Sequences in the queue of an instance, on average over all samples.
    """

    finished: dict[int, FinishedRequest]
    batch: float
    waiting: float
    preemptions: int
    lost: int


class LoadFile(msgspec.Struct, frozen=True, kw_only=True):
    """The load as scenarios read it.

    Attributes:
        span_s: From the first arrival to the last.
        expected: Whether it says which lengths were expected.
        shares: Whether any two prompts begin alike; else prefix caches, which hold nothing of use, are left out.
    """

    path: str
    count: int
    span_s: float
    expected: bool
    shares: bool

    def scenario(self, table: Mapping[str, Any], *, speed: float = 1.0, count: int = 0) -> ScenarioSpec:
        """The load on a cluster. ``count``: the first so many requests; 0 for all. ``speed``: of its arrivals."""
        workload = {
            "count": min(count, self.count) if count else self.count,
            "arrivals": {"kind": "trace", "speed": speed},
            "lengths": {"kind": "trace", "path": self.path, "format": "recording"},
        }
        prediction = {"kind": "recorded" if self.expected else "oracle", "asked": "always"}
        groups = table["cluster"]["groups"]
        if not self.shares:
            groups = [{**group, "engine": {**group["engine"], "prefix_caching": False}} for group in groups]
        cluster = {**table["cluster"], "groups": groups}
        instances = sum(group["instances"] for group in groups)
        report_ms = int(1000 * self.span_s / speed * instances / REPORTS_MAX)
        report_ms = max(REPORT_MS_MIN, min(REPORT_MS_MAX, report_ms))
        intervals = {"status_ms": report_ms, "summary_ms": report_ms}
        stages = {**table["stages"]}
        stages["period_s"] = min(stages["period_s"], max(1.0, self.span_s / speed / PLANNINGS_MIN))
        own = {"workload": workload, "prediction": prediction, "intervals": intervals, "stages": stages}
        own["output"] = {"plots": False}
        return scenario_of({**table, "cluster": cluster, **own})


def replay(spec: ScenarioSpec, fitted: FittedCluster, shown: ShownRun | None = None) -> Replayed:
    """Runs a scenario on the simulated cluster."""
    outcome = run_scenario(spec, step_times=fitted.step_time, folders=(Path(),), shown=shown)
    done = {each.number: each for each in outcome.finished if each.outcome == "completed"}
    busy = [sample.running for sample in outcome.samples if sample.running]
    return Replayed(
        finished=done,
        batch=float(np.mean(busy)) if busy else 0.0,
        waiting=float(np.mean([sample.waiting for sample in outcome.samples])) if outcome.samples else 0.0,
        preemptions=sum(last.preemptions for last in last_samples(outcome.samples).values()),
        lost=spec.workload.count - len(done),
    )


def fitted_cluster(spec: ClusterSpec, load: RecordedLoad, file: LoadFile) -> FittedCluster:
    """Fits step times and message times to the first half of the recording.

    Args:
        spec: The cluster's file; models are folders.
    """
    served = [row for _, row in load.requests]
    half_ns = served[load.half].at_ns
    records = load.instances
    kinds, sets = _kinds(spec, records), load_step_times(step_time_files(spec))[0]
    models: dict[str, LinearStepTime] = {}
    named: dict[str, str] = {}
    slowdowns: dict[str, float] = {}
    intervals = 0
    for model in sorted({record.model for record in records.values()}):
        own = {name: record for name, record in records.items() if record.model == model}
        first = next(iter(own.values()))
        hosts = {name: record.host if record.shape.startswith("cpu") else "" for name, record in own.items()}
        steps = [row for row in load.steps if row.instance in own and row.at_ns < half_ns]
        found = computed(steps, [*load.earlier, *served], hosts, first.token_budget)
        rows = [row for each in found.values() for row in each]
        intervals += len(rows)
        slowdowns[model] = float(np.mean([slowdown(each) for each in found.values()])) if found else 0.0
        for kind in sorted({kinds[name] for name in own}):
            alike = next(record for name, record in own.items() if kinds[name] == kind)
            its = [row for name, each in found.items() if kinds[name] == kind for row in each]
            if (base := sets.get(alike.step_time)) is not None:
                named[kind] = alike.step_time
            parameters = scheduler_parameters(alike, prefix_caching=True)
            made = fit(its, base, parameters, slowdowns[model]) or fit(rows, base, parameters, slowdowns[model])
            if made is None:
                why = "too little was recorded to fit step times, and its instances name no set that can be read"
                raise ScenarioError(f"model {model}: {why}")
            models[kind] = made
    made_up = FittedCluster(
        spec=spec,
        records=records,
        kinds=kinds,
        models=models,
        named=named,
        slowdowns=slowdowns,
        intervals=intervals,
    )
    return _levelled(made_up, load, file) if models else made_up


def _kinds(spec: ClusterSpec, records: Mapping[str, InstanceRecord]) -> dict[str, str]:
    """Kind of each instance: groups of one model may be of unequal machines."""
    groups = {
        name: f"{slot.model.name}/{index}"
        for slot in workers_of(spec)
        if len(slot.model.groups) > 1
        for index, group in enumerate(slot.model.groups)
        if group is slot.group
        for name in slot.instances
    }
    return {name: groups.get(name, record.model) for name, record in records.items()}


def _levelled(fitted: FittedCluster, load: RecordedLoad, file: LoadFile) -> FittedCluster:
    """Step times and message times such that median TPOT and TTFT come out as recorded. Those that came while slow ones
    of the first half were under way are replayed beside them: alone, the last would be too fast.
    """
    served = [row for _, row in load.requests]
    fitted_to = range(load.lead, min(load.half, load.lead + FITTED_REQUESTS))
    until_ns = served[fitted_to.stop].at_ns + slow_request_ns(served)
    count = sum(row.at_ns < until_ns for row in served)
    best, least = fitted, math.inf
    for place in range(ROUNDS):
        again = replay(file.scenario(fitted.table(fitted.spec), count=count), fitted)
        pairs = [(served[number], again.finished[number]) for number in fitted_to if number in again.finished]
        if not (done := [(row, sim) for row, sim in pairs if row.outcome == "completed" and row.ttft_ns > 0]):
            break
        paced = [(row, sim) for row, sim in done if len(row.outputs) == 1 < row.outputs[0]]
        factors = {kind: _factor(kind, fitted.kinds, paced) for kind in fitted.models}
        ttft_us, again_us = (_median([each.ttft_ns / 1e3 for each in side]) for side in zip(*done, strict=True))
        off = TTFT_WEIGHT * abs(math.log(ttft_us / again_us)) + max(abs(math.log(by)) for by in factors.values())
        if off < least:
            best, least = fitted, off
        late_us = _median([(row.ttft_ns - sim.ttft_ns) / 1e3 for row, sim in done])
        by = {kind: factor ** (DAMPED if place else 1.0) for kind, factor in factors.items()}
        worker_us = min(WORKER_US_MAX, max(0.0, fitted.worker_us + late_us / WORKER_HOPS))
        moved = WORKER_HOPS * abs(worker_us - fitted.worker_us) > LEVELLED * ttft_us
        if not moved and all(abs(factor - 1) < LEVELLED for factor in by.values()):
            break
        models = {name: model.times(by[name]) for name, model in fitted.models.items()}
        fitted = msgspec.structs.replace(fitted, models=models, worker_us=worker_us)
    return best


def _factor(kind: str, kinds: Mapping[str, str], paced: Sequence[tuple[RequestServed, FinishedRequest]]) -> float:
    """Recorded over simulated median TPOT of requests that ended at instances of a kind."""
    real = _median([row.tpot_ns for row, _ in paced if kinds.get(row.instance) == kind])
    again = _median(
        [(sim.e2e_ns - sim.ttft_ns) / (sim.output_tokens - 1) for _, sim in paced if kinds.get(sim.instance) == kind]
    )
    factor = real / again if again else 1.0
    return min(FACTOR_MAX, max(FACTOR_MIN, factor)) if math.isfinite(factor) else 1.0


def _median(values: Sequence[float]) -> float:
    return float(np.median(values)) if values else math.nan
