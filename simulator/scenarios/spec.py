"""Schema of a scenario file. Durations carry their unit in the name; an unknown key is refused by its name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from millrace.contracts.bounds import Count, Natural, Span, Wait
from millrace.enginemodel.parameters import EngineParameters
from millrace.policies.step_bounds import StepObjectives
from millrace.workloads.arrivals import Arrivals, Poisson
from millrace.workloads.lengths import LogNormalLengths

from services.coordinator.config import (
    ProvisioningConfig,
    RolePolicyConfig,
    StagesConfig,
    provisioning_policy,
)
from simulator.scenarios.migration_spec import MigrationSpec
from simulator.scenarios.trading_spec import TradingSpec

#: Name of the model where a scenario names none.
MODEL = "modelled"


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Instances that are alike.

    Attributes:
        name: Their names begin with it: ``<name>-000``.
        model: What they serve. Groups may serve the same model or different ones.
        instances: How many.
        members: Their names, where they have others.
        spares: Instances beyond those, like these, that provisioning may start.
        shape: What they run on, as an operator names it; empty for the group's name.
        step_time: A set of step-time coefficients that ships, or the path of one.
        speed: How much faster than that they are.
        told_step_time: The set that they name themselves, by which they are forecast and planned; empty for their own.
        engine: Limits of the scheduler.
        host: The machine that they are on, with its network card; groups may share one. Empty: each instance has a
            machine of its own.
        instances_per_host: So many in a row share a machine, ``<name>-host-0`` and so on; 0 for what ``host`` says.
        neighbour_slowdown: Each other instance of the host that computes makes their steps longer by this share.
    """

    name: str = "gpu"
    model: str = MODEL
    instances: Count = 4
    members: tuple[str, ...] = ()
    spares: Annotated[int, msgspec.Meta(ge=0)] = 0
    shape: str = ""
    step_time: str = "a100-llama-3-8b"
    speed: Span = 1.0
    told_step_time: str = ""
    engine: EngineParameters = EngineParameters()
    host: str = ""
    instances_per_host: Annotated[int, msgspec.Meta(ge=0)] = 0
    neighbour_slowdown: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.0

    def host_of(self, instance: str) -> str:
        """The machine of an instance of this group; empty for one of its own."""
        if not self.instances_per_host:
            return self.host
        number = int(instance.rpartition("-")[2]) // self.instances_per_host
        return f"{self.host or self.name}-host-{number}"

    def names(self) -> tuple[str, ...]:
        if len(self.members) == self.instances:
            return self.members
        return tuple(f"{self.name}-{index:0{len(str(self.instances - 1))}}" for index in range(self.instances))


class PredictorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the predictors; see ``services.predictor.config.PredictorConfig``."""

    default_output_tokens: int = 128
    learn_lengths: bool = True
    calibrate: bool = True
    prefixes: bool = True


class ClusterTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Instances and services of a scenario's cluster.

    Attributes:
        predictors: Predictor actors; each answers for its share of the instances. Started only where the policy asks.
        queue_max: Sequences that may wait at an instance beyond its running batch.
        restart_s: A process that ended is started again after so long.
        cold_start_s: From the order to start an instance to its first word.
        stall_s: A request without a token for so long goes on elsewhere; long, because overload is no stall.
    """

    groups: tuple[Group, ...] = (Group(),)
    ingresses: Count = 1
    coordinators: Count = 1
    predictors: Count = 1
    predictor: PredictorSpec = PredictorSpec()
    queue_max: int = 100_000
    restart_s: float = 1.0
    cold_start_s: Wait = 30.0
    stall_s: float = 3600.0


class DispatchSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy.

    Attributes:
        policy: Name of a dispatch policy, or a file that ends in ``.py``; a relative path is looked for from here, then
            beside the scenario.
        parameters: Its parameters.
        stage_by: Length by which a request is given to a stage: ``present``, or ``expected``, the predicted final one.
    """

    policy: str = "join_shortest_queue"
    parameters: dict[str, Any] = {}
    stage_by: Literal["present", "expected"] = "present"


class LogNormal(
    LogNormalLengths, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="log_normal", tag_field="kind"
):
    """Independent log-normal lengths."""


class Fitted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="fitted", tag_field="kind"):
    """Lengths of a distribution that ships (libs/millrace/workloads/fitted).

    Attributes:
        prompt_max, output_max, total_max: Longer requests are cut to these, tokens; 0 for no bound.
    """

    name: str
    prompt_max: int = 0
    output_max: int = 0
    total_max: int = 0


class TraceRows(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="trace", tag_field="kind"):
    """Rows of a trace.

    Attributes:
        path: File or folder; a relative one is looked for in MILLRACE_DATA, then beside the scenario.
        format: One of ``millrace.workloads.readers``, or ``servegen``.
        shuffle: Draw rows at random instead of in their order. Not with the trace's own times.
        skip: Rows left out at the beginning.
        begin_s: ServeGen: time of the day at which the scenario begins.
        prefixes: Whether shared prefixes of the trace are kept; else every prompt is a stranger.
    """

    path: str
    format: Literal["azure", "burstgpt", "mooncake", "openai", "recording", "servegen", "sharegpt"]
    shuffle: bool = False
    skip: int = 0
    begin_s: float = 0.0
    prefixes: bool = True
    prompt_max: int = 0
    output_max: int = 0
    total_max: int = 0


LengthSource = LogNormal | Fitted | TraceRows


class ModelLoad(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Load of one model.

    Attributes:
        share: Its part of all requests, relative to the other models' shares.
        output_scale: Outputs of this model are so many times as long as the workload's lengths say.
    """

    share: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    output_scale: Annotated[float, msgspec.Meta(gt=0)] = 1.0


class Phase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the requests whose lengths differ from the source's.

    Attributes:
        share: Of all requests, relative to the other phases' shares; phases follow each other.
        prompt_scale: Prompts are so many times as long as the source says; at most 1, for shared prefixes are not made.
        output_scale: The same of outputs.
    """

    share: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    prompt_scale: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    output_scale: Annotated[float, msgspec.Meta(gt=0)] = 1.0


class WorkloadSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workload of a scenario.

    Attributes:
        count: Requests.
        warm_up: The first ones are served and left out of the statistics.
        output_limit: ``max_tokens`` of each request; 0 for what the model takes. The engine ends a request at the
            length that the workload says, which is unknown beforehand.
        residents: The first so many arrive at once, as sequences that have run for a while: the cluster begins near
            its steady state, which one that begins empty takes the life of its longest sequences to reach.
        stated: Each request states its length instead (``ignore_eos`` with ``max_tokens``); no tagger is asked.
        phases: Parts of the load, one after the other; empty for one as the source says.
        models: Load by model. Empty: equal shares for all models of the cluster.
    """

    arrivals: Arrivals = Poisson(rate_per_s=10.0)
    lengths: LengthSource = LogNormal(prompt_mean=200.0, output_mean=200.0, prompt_sigma=1.0, output_sigma=0.8)
    count: Count = 1000
    warm_up: Natural = 0
    residents: Natural = 0
    output_limit: int = 0
    stated: bool = False
    phases: tuple[Phase, ...] = ()
    models: dict[str, ModelLoad] = {}


class PredictionSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Predictions of output lengths in a scenario.

    Attributes:
        kind: ``oracle``: the truth; ``noisy``: the truth times a normal number around 1 with ``sigma``, cut to
            [0.1, 5]; ``tagger``: the tagger's model; ``recorded``: what the recording says; ``none``: nothing.
        asked: ``needed``: where the dispatch policy looks at lengths; ``always``: for each request, as brokers want it.
    """

    kind: Literal["oracle", "noisy", "tagger", "recorded", "none"] = "oracle"
    sigma: Wait = 0.0
    asked: Literal["needed", "always"] = "needed"


class NetworkSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The network: each message takes two hops of ``delay_us`` and an exponential ``jitter_us``.

    Attributes:
        worker_delay_us, worker_jitter_us: The same for the hop to and from a worker, on top: where it shares its core
            with an engine, that has to make room first.
    """

    delay_us: Wait = 100.0
    jitter_us: Wait = 0.0
    worker_delay_us: Wait = 0.0
    worker_jitter_us: Wait = 0.0


class FaultSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that goes wrong.

    Attributes:
        at_s: When, counted from the first possible arrival.
        kind: ``kill`` an actor; ``stall`` an instance's engine; ``partition`` a node; ``slow_link``: its messages take
            50 ms and more; ``stop_bus``; ``slow_disk``: each write of the bus's key-value store takes 2 s.
        target: Name of the actor; empty for the bus.
        duration_s: How long it lasts, but for a kill.
    """

    at_s: float
    kind: Literal["kill", "stall", "partition", "slow_link", "stop_bus", "slow_disk"]
    target: str = ""
    duration_s: float = 1.0


class SloSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of requests that count as goodput; 0 for no bound. ``tpot_ms`` is the mean after the first token."""

    ttft_ms: float = 3000.0
    tpot_ms: float = 0.0
    e2e_ms: float = 0.0


class IntervalSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Intervals of reports and samples. Live, the first two are 20 and 25 ms and tokens come with each step.

    Attributes:
        status_ms: Least time between two snapshots of an instance.
        summary_ms: Least time between two summaries; with more than 500, ingress would take the instance for dead.
        token_ms: Tokens between the first and the last of a request are reported at most so often; 0 for each step.
        run_ms: Longest run of decode steps that is computed at once; 0 for step by step. Changes no step's time.
        sample_ms: How often the timeline is sampled.
    """

    status_ms: Count = 250
    summary_ms: Annotated[int, msgspec.Meta(ge=1, le=500)] = 250
    token_ms: Natural = 1000
    run_ms: Natural = 1000
    sample_ms: Count = 1000


class OutputSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Output files of a scenario run.

    Attributes:
        folder: Where to; empty for nothing but the printed tables.
        plots: Whether pictures are drawn.
    """

    folder: str = ""
    plots: bool = True


class ScenarioSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole scenario.

    Attributes:
        limit_s: Virtual time after the last arrival at which what is still open counts as lost.
        provisioning, stages, step_bounds: As in the coordinator's configuration. The model is called ``modelled``; a
            strategy's ``instances_max`` says how many spare instances there are.
        roles: How roles change under load, as ``flips`` in the coordinator's configuration; ``migration.roles`` are
            those of the beginning.
        extension: A file whose ``cluster`` is built in place of ScenarioCluster, a subclass of it; empty for none.
    """

    name: str = "scenario"
    seed: int = 0
    limit_s: float = 3600.0
    cluster: ClusterTable = ClusterTable()
    dispatch: DispatchSpec = DispatchSpec()
    provisioning: ProvisioningConfig = ProvisioningConfig()
    stages: StagesConfig = StagesConfig()
    migration: MigrationSpec = MigrationSpec()
    roles: RolePolicyConfig = RolePolicyConfig()
    step_bounds: StepObjectives = StepObjectives()
    trading: TradingSpec = TradingSpec()
    extension: str = ""
    workload: WorkloadSpec = WorkloadSpec()
    prediction: PredictionSpec = PredictionSpec()
    network: NetworkSpec = NetworkSpec()
    faults: tuple[FaultSpec, ...] = ()
    slo: SloSpec = SloSpec()
    intervals: IntervalSpec = IntervalSpec()
    output: OutputSpec = OutputSpec()

    def models(self) -> dict[str, ModelLoad]:
        """All models of the cluster with their load, in the order of the groups."""
        loads, names = self.workload.models, dict.fromkeys(group.model for group in self.cluster.groups)
        return {name: loads.get(name, ModelLoad(share=0.0)) if loads else ModelLoad() for name in names}

    def spare_groups(self) -> dict[str, Group]:
        """Group of each instance that may be started, by its name. A strategy has those of the first group at least
        that its bound allows.

        Raises:
            ConfigError: no such strategy, or its parameters are wrong.
        """
        groups = self.cluster.groups
        counts = [group.spares for group in groups]
        running = sum(each.instances for each in groups if each.model == groups[0].model)
        most = getattr(provisioning_policy(self.provisioning)[1], "instances_max", running)
        counts[0] = max(counts[0], most - running)
        return {
            f"{group.name}-{group.instances + index}": group
            for group, count in zip(groups, counts, strict=True)
            for index in range(count)
        }

    def instances(self) -> dict[str, tuple[str, ...]]:
        """Names of all instances by group, spares included."""
        names = {group.name: group.names() for group in self.cluster.groups}
        for name, group in self.spare_groups().items():
            names[group.name] += (name,)
        return names
