"""Renders the options of `millrace up` to a cluster's specification."""

from __future__ import annotations

import argparse
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from millrace.actor.errors import ConfigError
from millrace.cli.cascade_flags import PARAMETERS, cascade_of, judge_model
from millrace.cli.errors import CliError
from millrace.cluster.checks import check_spec
from millrace.cluster.model_folders import context_length, is_repository, model_folder, with_model_folders
from millrace.cluster.reading import anchored, read_cluster
from millrace.cluster.settings import with_cluster_settings
from millrace.cluster.spec import (
    ApiSpec,
    ClusterPolicies,
    ClusterSpec,
    EngineName,
    GroupSpec,
    KvReplicaSpec,
    ModelSpec,
    NatsSpec,
    PolicyChoice,
    ServiceCounts,
    StageSpec,
    TelemetrySpec,
)
from millrace.cluster.stage_cuts import even_stages
from millrace.cluster.workers import instances_of
from millrace.supervision.roles import roles_of

#: vLLM on CPU pays one core per engine; more engines than this are for GPU nodes and compose.
VLLM_INSTANCES_MAX = 4

#: Modelled engines where nobody says how many.
MODELLED_INSTANCES = 8

#: Instances that an error names.
NAMES_SHOWN = 8

#: Options that go with a cluster's file: what is the machine's, not the cluster's.
_OF_THE_MACHINE = {
    "host": ("api", "host"),
    "port": ("api", "port"),
    "keys": ("api", "keys"),
    "nats_port": ("nats", "port"),
    "otlp": ("telemetry", "otlp"),
}

#: Options about this run of it.
_OF_THE_RUN = {"cluster", "dir", "detach", "take_over", "set", "url", "token", "name"}

_Group: TypeAlias = "argparse._ArgumentGroup"


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """Options that describe a cluster. None of them has a default, so that it shows which were given."""
    add = parser.add_argument
    add("--cluster", metavar="FILE", help="a cluster's TOML file (docs/OPERATIONS.md), in place of the options below")
    _add_engine_options(parser.add_argument_group("models and engines"))
    _add_scheduling_options(parser.add_argument_group("scheduling"))
    _add_service_options(parser.add_argument_group("services"))
    group = parser.add_argument_group("this machine", "also with --cluster; they override its file")
    add = group.add_argument
    add("--host", help="address of the API (default: 127.0.0.1)")
    add("--port", type=int, help="port of the API (default: 8000)")
    add("--keys", metavar="FILE", help="API keys (`millrace keys`); without it none is required")
    add("--nats-port", type=int, help="of nats-server (default: 4222); if it is in use, a free one is chosen")
    add("--otlp", metavar="URL", help="OTLP/HTTP endpoint; without it traces go to the cluster's folder")


def _add_engine_options(group: _Group) -> None:
    model, add = group.add_mutually_exclusive_group().add_argument, group.add_argument
    model(
        "--model",
        help="a model of models/ (default: millrace-mini), a folder, or owner/name in Hugging Face's cache",
    )
    model("--models", metavar="NAME,NAME", help="several models; engines are divided among them")
    model(
        "--cascade",
        metavar="NAME,NAME",
        help="several models behind one name, cheapest first; if an answer scores too low, the next is asked",
    )
    add(
        "--thresholds",
        metavar="N,N",
        help="of a cascade: least score, 0 to 100, at which an answer is delivered, one per model but the last "
        "(default: 70)",
    )
    add("--judge", metavar="NAME", help="of a cascade: what scores, a name or a file (default: confidence)")
    add("--served-name", metavar="NAME", help="name under which clients ask for the model (default: the folder's)")
    add("--engine", choices=["vllm", "modelled"], help="vLLM (default), or a model of its scheduler and step times")
    add(
        "--instances",
        type=int,
        metavar="N",
        help="engines of all models (default: one per core, at most 4; modelled: 8)",
    )
    add(
        "--instances-max",
        type=int,
        metavar="N",
        help="engines at once, for `scale` (default: --instances) and --provision (one per core, modelled: twice)",
    )
    add("--processes", type=int, metavar="N", help="worker processes of modelled engines (default: one per 64)")
    add("--roles", metavar="LIST", help="split prefill and decode: worker-0=prefill,worker-1=decode (default: both)")


def _add_scheduling_options(group: _Group) -> None:
    add = group.add_argument
    add("--policy", help="dispatch policy: a name (docs/FORECASTING.md), or a .py file of your own (default: forecast)")
    add(
        "--stages",
        type=int,
        metavar="N",
        help="stages by sequence length, at most one per engine; sequences move on as they grow (default: 1)",
    )
    add("--trading", metavar="POLICY", help="move running requests for balance, by delay or a .py file (default: none)")
    add("--provision", metavar="POLICY", help="start and stop engines by load: preempt or relief (default: none)")


def _add_service_options(group: _Group) -> None:
    add = group.add_argument
    add("--ingresses", type=int, metavar="N", help="ingress processes that share the port (default: 1)")
    add(
        "--kv-replicas",
        action="store_true",
        default=None,
        help="copy running sequences' KV ahead to a second engine, for their continuation after a crash",
    )
    add(
        "--set",
        metavar="PATH=VALUE",
        action="append",
        help="any key of a cluster's file or of a service (docs/CONFIGURATION.md), such as worker.max_num_seqs=8 or "
        "worker-1.max_num_seqs=4 for one; may be repeated",
    )


def cluster_of(arguments: argparse.Namespace, cores: int) -> ClusterSpec:
    """The cluster that the options mean, checked, with the folders of its models.

    Args:
        arguments: What `add_cluster_options` added.
        cores: Of this machine, for the default number of engines.

    Raises:
        CliError: naming the option, or the file and its field.
    """
    given = {name for name, value in vars(arguments).items() if value is not None}
    try:
        spec = _of_file(arguments, given) if arguments.cluster else _of_options(arguments, cores)
        settings = [each for each in arguments.set or [] if not (arguments.cascade and each.startswith(PARAMETERS))]
        spec = anchored(with_cluster_settings(_on_this_machine(spec, arguments, given), settings), Path.cwd())
        spec = with_model_folders(_with_roles(spec, arguments.roles or ""))
        check_spec(spec)
    except ConfigError as error:
        raise CliError(str(error)) from None
    return spec


def _of_file(arguments: argparse.Namespace, given: set[str]) -> ClusterSpec:
    others = sorted(given - set(_OF_THE_MACHINE) - _OF_THE_RUN)
    if others:
        raise CliError(f"--{others[0].replace('_', '-')}: not together with --cluster; set it in {arguments.cluster}")
    return read_cluster(arguments.cluster)


def _of_options(arguments: argparse.Namespace, cores: int) -> ClusterSpec:
    told = arguments.cascade or arguments.models or arguments.model or "millrace-mini"
    names = [name.strip() for name in told.split(",")]
    if arguments.model:
        names = [arguments.model]  # a folder's name may have a comma
    if arguments.served_name and len(names) > 1:
        raise CliError("--served-name: several models are served under the names of their folders")
    if arguments.stages and len(names) > 1:
        raise CliError("--stages: for several models set the stages of each in a file (--cluster)")
    served = [*names, *_judging(arguments, names)]
    groups = _groups(arguments, cores, len(served))
    models = [_model(arguments, name, group) for name, group in zip(served, groups, strict=True)]
    return ClusterSpec(
        models=models,
        cascade=cascade_of(arguments, [model.name for model in models[: len(names)]]),
        policies=ClusterPolicies(
            dispatch=PolicyChoice(name=arguments.policy or ""),
            provisioning=PolicyChoice(name=_strategy(arguments)),
            trading=PolicyChoice(name=arguments.trading or ""),
        ),
        services=ServiceCounts(
            ingresses=_or(arguments.ingresses, 1),
        ),
        kv_replicas=KvReplicaSpec(enabled=bool(arguments.kv_replicas)),
    )


def _judging(arguments: argparse.Namespace, tiers: list[str]) -> list[str]:
    """The model that judges, where it is none of the tiers."""
    judge = judge_model(arguments)
    return [judge] if judge and model_folder(judge) not in map(model_folder, tiers) else []


def _groups(arguments: argparse.Namespace, cores: int, models: int) -> list[GroupSpec]:
    """One group per model; engines are divided as evenly as can be."""
    engine = EngineName(arguments.engine or "vllm")
    default = min(cores, VLLM_INSTANCES_MAX) if engine is EngineName.VLLM else MODELLED_INSTANCES
    default = models if arguments.cascade else default
    first = _or(arguments.instances, max(default, models))
    if first < models:
        raise CliError(f"--instances {first}: at least one per model, {models}")
    spares = _bound(arguments, engine, first, cores) - first
    shares, extra = _divided(first, models), _divided(spares, models)
    processes = _divided(arguments.processes or 0, models)
    if arguments.processes is not None and not models <= arguments.processes <= first:
        raise CliError(f"--processes {arguments.processes}: between {models} and the {first} engines")
    return [
        GroupSpec(count=count, spares=spare, engine=engine, processes=0 if engine is EngineName.VLLM else share)
        for count, spare, share in zip(shares, extra, processes, strict=True)
    ]


def _bound(arguments: argparse.Namespace, engine: EngineName, first: int, cores: int) -> int:
    """Engines that may run at once."""
    if arguments.instances_max is not None:
        if arguments.instances_max < first:
            raise CliError(f"--instances-max {arguments.instances_max}: at least the {first} at the start")
        return int(arguments.instances_max)
    if not _strategy(arguments):
        return first
    return max(first, cores) if engine is EngineName.VLLM else 2 * first


def _divided(count: int, parts: int) -> list[int]:
    return [count // parts + (index < count % parts) for index in range(parts)]


def _model(arguments: argparse.Namespace, name: str, group: GroupSpec) -> ModelSpec:
    folder = model_folder(name)
    served = arguments.served_name or (name if is_repository(name) else folder.name)
    return ModelSpec(name=served, path=str(folder), groups=[group], stages=_stages(arguments, folder))


def _stages(arguments: argparse.Namespace, folder: Path) -> list[StageSpec]:
    if arguments.stages in (None, 1):
        return []
    if arguments.stages < 1:
        raise CliError(f"--stages {arguments.stages}: at least 1")
    try:
        return even_stages(arguments.stages, context_length(folder))
    except ValueError as error:
        raise CliError(f"--stages {arguments.stages}: {error}") from None


def _strategy(arguments: argparse.Namespace) -> str:
    return "" if arguments.provision in (None, "none") else str(arguments.provision)


def _with_roles(spec: ClusterSpec, text: str) -> ClusterSpec:
    """Roles for the coordinator's configuration, by instance or pattern.

    Raises:
        CliError: a role for nobody: several modelled engines share a worker, and their names are longer than its.
    """
    try:
        roles = roles_of(text)
    except ValueError as error:
        raise CliError(f"--roles: {error}") from None
    if not roles:
        return spec
    names = [name for model in spec.models for name in instances_of(spec, model, spares=True)]
    for pattern in roles:
        if not any(fnmatchcase(name, pattern) for name in names):
            shown = ", ".join(names[:NAMES_SHOWN]) + (", ..." if len(names) > NAMES_SHOWN else "")
            raise CliError(f"--roles: no instance {pattern}; there are {shown}")
    settings = msgspec.structs.replace(spec.settings, coordinator={**spec.settings.coordinator, "roles": roles})
    return msgspec.structs.replace(spec, settings=settings)


def _on_this_machine(spec: ClusterSpec, arguments: argparse.Namespace, given: set[str]) -> ClusterSpec:
    tables: dict[str, dict[str, Any]] = {"api": {}, "nats": {}, "telemetry": {}}
    for option in given & set(_OF_THE_MACHINE):
        table, field = _OF_THE_MACHINE[option]
        tables[table][field] = getattr(arguments, option)
    if keys := tables["api"].get("keys"):
        tables["api"]["keys"] = str(Path(keys).absolute())
    replaced: dict[str, ApiSpec | NatsSpec | TelemetrySpec] = {
        name: msgspec.structs.replace(getattr(spec, name), **fields) for name, fields in tables.items()
    }
    return msgspec.structs.replace(spec, **replaced)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
