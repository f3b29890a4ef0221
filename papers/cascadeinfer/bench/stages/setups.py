"""Workloads and layouts of the comparisons: one cluster of modelled H200, four traces' lengths, kappa as a key."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from millrace.enginemodel.parameters import EngineParameters
from millrace.policies.stages import STAGE_POLICIES
from millrace.policies.stages.instance import InstanceModel, linear_instance
from millrace.policies.stages.membership import StageShape
from millrace.policies.stages.objectives import Constraints, StageCosts, fair, open_costs
from millrace.policies.stages.statistics import BINS, EDGES, LengthStatistics, statistics_of
from millrace.policies.stages.view import PlanningView, one_shape
from millrace.workloads.shape import RequestShape

from papers import PAPERS
from papers.block.bench.bound import fluid_bound
from papers.cascadeinfer.unequal import WITH, load_unequal
from simulator.scenarios.load import arrivals
from simulator.scenarios.reading import scenario_of
from simulator.scenarios.spec import ScenarioSpec

SET = "h200-llama-3-8b"

#: KV memory of 896,000 tokens, as an H200 has beside Llama-3-8B in 16 bits.
ENGINE = {
    "max_model_len": 65_536,
    "blocks_total": 56_000,
    "max_sequences": 256,
    "token_budget": 8_192,
    "prefix_caching": False,
}

#: Plans that follow each other until the layout stays.
STEPS_MAX = 5

#: Draws of lengths from which the fluid bound and the planners' statistics are computed.
DRAWS = 6_000


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths of a trace, as the distribution that ships has them.

    Attributes:
        requests: Of a run of eight instances, besides residents.
        long_lived: Sequences live for minutes, longer than a run: it begins with those of the steady state.
        ttft_s, tpot_s: SLO: about five times an idle engine's.
    """

    lengths: str
    requests: int
    long_lived: bool = False
    ttft_s: float = 1.0
    tpot_s: float = 0.03


TRACES: Mapping[str, Trace] = {
    "R1": Trace(lengths="servegen-deepseek-r1", requests=800, long_lived=True),
    "Mooncake": Trace(lengths="mooncake-conversation", requests=800, ttft_s=5.0),
    "ShareGPT": Trace(lengths="sharegpt", requests=4_000),
    "Azure": Trace(lengths="azure-conversation", requests=2_400),
}


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster and what comes.

    Attributes:
        load: Share of the fluid bound at kappa 0.
        requests: 0 for the trace's own number, in proportion to the instances.
        steady: With long-lived sequences the cluster begins with those that one stage would hold at this load.
        warm: It does so with short-lived ones too.
        changes: Tables laid over the scenario.
    """

    trace: str = "R1"
    kappa: float = 0.2
    instances: int = 8
    load: float = 0.8
    requests: int = 0
    steady: bool = True
    warm: bool = False
    changes: Mapping[str, Any] = {}

    @property
    def count(self) -> int:
        """Requests of one run."""
        return self.requests or max(200, TRACES[self.trace].requests * self.instances // 8)

    def residents(self) -> int:
        """Sequences of the steady state of one stage, by the planner's model; those that memory holds where none is."""
        if not (self.warm or (self.steady and TRACES[self.trace].long_lived)):
            return 0
        return self.residents_of(one_shape(self.instances))

    def residents_of(self, *shapes: StageShape) -> int:
        """Sequences of the steady state of a layout, by the planner's model; bounded by what its memory holds."""
        edges = (*(EDGES.index(shape.length_min) for shape in shapes), BINS)
        costs = open_costs(self.statistics(), self.model(), edges, self.instances, Constraints())
        found = 0.0
        for index, shape in enumerate(shapes):
            context = float(costs.context[index, index + 1])
            held = Constraints().kv_used_max * self.model().kv_tokens / max(1.0, context)
            each = float(costs.sequences[index, index + 1, shape.instances])
            found += shape.instances * min(each, held, ENGINE["max_sequences"])
        return round(found)

    def costs(self) -> StageCosts:
        """Tables of the open objective over every edge, as ``exact`` minimises it, without its margins."""
        found = open_costs(self.statistics(), self.model(), range(BINS + 1), self.instances, Constraints())
        return fair(found, Constraints().slowdown_max)

    def begun(self, shapes: Sequence[StageShape]) -> dict[str, Any]:
        """The tables of ``from_own`` where runs begin with residents; nothing where they begin empty."""
        return self.from_own(shapes) if self.residents() else {}

    def from_own(self, shapes: Sequence[StageShape]) -> dict[str, Any]:
        """Tables of a scenario that begins with as many residents as the layout itself holds."""
        residents = self.residents_of(*shapes)
        return {"workload": {"residents": residents, "count": residents + self.count}}

    def spec(self, *layers: Mapping[str, Any], seed: int = 0) -> ScenarioSpec:
        """The scenario with a variant's tables over it."""
        table = self._table(self.rate_per_s())
        for layer in (self.changes, *layers):
            table = merged(table, layer)
        return scenario_of({**table, "seed": seed})

    @property
    def bounds(self) -> dict[str, float]:
        """The trace's SLO, as planners are told it."""
        trace = TRACES[self.trace]
        return {"ttft_ms": 1e3 * trace.ttft_s, "tpot_ms": 1e3 * trace.tpot_s}

    def rate_per_s(self) -> float:
        """Arrivals per second."""
        return round(self.load * _bound(self.trace, self.instances), 3)

    def _table(self, rate_per_s: float) -> dict[str, Any]:
        trace = TRACES[self.trace]
        group = {"instances": self.instances, "step_time": f"{SET}{WITH}{self.kappa:g}", "engine": ENGINE}
        return {
            "cluster": {"groups": [group]},
            "dispatch": {"policy": "join_shortest_queue"},
            "migration": {"bandwidth_gbps": 400.0, "instances_each": 8},
            "workload": {
                "count": self.residents() + self.count,
                "residents": self.residents(),
                "arrivals": {"kind": "poisson", "rate_per_s": rate_per_s},
                "lengths": {"kind": "fitted", "name": trace.lengths, "total_max": ENGINE["max_model_len"] - 1},
            },
            "prediction": {"kind": "none"},
            "intervals": {"token_ms": 5_000, "sample_ms": 2_000},
            "slo": {"ttft_ms": 1e3 * trace.ttft_s, "tpot_ms": 1e3 * trace.tpot_s},
        }

    def statistics(self) -> LengthStatistics:
        """Return the statistics that a planner would know of these lengths at this rate."""
        shapes = _shapes(self.trace)
        return statistics_of(
            [shape.prompt_tokens for shape in shapes],
            [shape.output_tokens for shape in shapes],
            span_s=len(shapes) / self.rate_per_s(),
        )

    def model(self) -> InstanceModel:
        """An instance as planners see it."""
        engine = EngineParameters(**ENGINE)  # type: ignore[arg-type]
        cost = load_unequal(f"{SET}{WITH}{self.kappa:g}").cost(engine)
        return linear_instance(
            cost,
            kv_tokens=engine.blocks_total * engine.block_size,
            max_sequences=engine.max_sequences,
            token_budget=engine.token_budget,
        )

    def planned(self, planner: str) -> tuple[StageShape, ...]:
        """The layout of a planner for these lengths and this rate, one stage where it finds none.

        ``two_phase`` and ``chain`` are the paper's: equation 1, octave tiers, better than one stage or not.
        """
        view = PlanningView(instances=self.instances, statistics=self.statistics(), instance=self.model())
        own = planner == "exact"
        bounds = {"bounds": self.bounds} if own else {"margin": 0.0, "cuts_per_octave": 1}
        policy, parameters = STAGE_POLICIES.choose(planner if own else f"{PAPERS}/cascadeinfer/{planner}.py", bounds)
        shapes = policy.decide(view, parameters).shapes
        for _ in range(STEPS_MAX):  # a layout that one stage's residents would fill is reached in steps
            before, view = shapes, replace(view, current=shapes)
            shapes = policy.decide(view, parameters).shapes
            if shapes == before:
                break
        return shapes


def merged(table: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A table with another laid over it, key by key; one of another ``kind`` takes its place."""
    if "kind" in table and "kind" in over and table["kind"] != over["kind"]:
        return dict(over)
    result = dict(table)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


def fixed(shapes: Sequence[StageShape]) -> dict[str, Any]:
    """A layout as the tables of a scenario."""
    ranges = [msgspec.to_builtins(shape) for shape in shapes]
    ranges = [{key: value for key, value in each.items() if value is not None} for each in ranges]
    return {"stages": {"policy": "fixed", "parameters": {"ranges": ranges}}}


def told(shapes: Sequence[StageShape]) -> str:
    """``3 from 0, 5 from 2048``."""
    return ", ".join(f"{shape.instances} from {shape.length_min}" for shape in shapes)


@functools.cache
def _shapes(trace: str) -> tuple[RequestShape, ...]:
    spec = scenario_of({"workload": {"count": DRAWS, "lengths": _lengths(trace)}})
    return tuple(arrival.shape for arrival in arrivals(spec.workload, seed=0, folders=()))


def _lengths(trace: str) -> dict[str, Any]:
    return {"kind": "fitted", "name": TRACES[trace].lengths, "total_max": ENGINE["max_model_len"] - 1}


@functools.cache
def _bound(trace: str, instances: int) -> float:
    groups = [{"instances": instances, "step_time": SET, "engine": ENGINE}]
    return fluid_bound(scenario_of({"cluster": {"groups": groups}}), _shapes(trace))
