"""Plans the thresholds and the instances of a cascade, and shows why.

FILE is a cluster's, with a ``[cascade]`` table. The front is printed: every design that no other one beats in
both quality and latency. Latencies are simulated with the step times of the models; scores and quality are those of the
recorded answers (``cascade.sample``, or --sample).
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import nats.errors
from nats.js.errors import Error as JetStreamError

from millrace.actor.bucket_reading import read_bucket
from millrace.actor.errors import ConfigError
from millrace.cascade.jobs import PlannedTier, PlanningJob, PlanningResult, plan_job
from millrace.cli.bus import open_bus
from millrace.cli.cluster import ConnectionSettings, add_connection_options, resolve_connection
from millrace.cli.errors import CliError
from millrace.cli.progress import working
from millrace.cluster.cascade_spec import CascadeSpec
from millrace.cluster.model_folders import context_length, judge_files, with_model_folders
from millrace.cluster.reading import read_cluster
from millrace.cluster.spec import ClusterSpec, GroupSpec, ModelSpec
from millrace.cluster.workers import instances_of
from millrace.contracts.cascade import CascadePlan, CascadeTier, FrontPoint
from millrace.contracts.codec import MalformedMessage, decode, encode
from millrace.contracts.subjects import Subjects, subject_token
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.registered import load_step_times
from millrace.policies.registry import policy_name
from millrace.supervision.service_fields import STEP_TIMES

#: Author of plans that a person puts; a coordinator keeps their thresholds.
OPERATOR = "operator"

#: Exit code where no plan keeps what is asked.
MISSED = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    add = parser.add_argument
    add("--cascade", required=True, metavar="FILE", help="a cluster's file with a cascade")
    add("--rate", type=float, required=True, metavar="N", help="requests per second")
    target = parser.add_mutually_exclusive_group()
    target.add_argument(
        "--quality", type=float, metavar="N", help="mean quality to keep, 0 to 100 (default: the file's)"
    )
    target.add_argument("--latency", type=float, metavar="S", help="p95 to keep, seconds (default: the file's)")
    add("--sample", metavar="FILE", help="recorded answers of all tiers with the truth (default: the file's)")
    add("--apply", action="store_true", help="put the thresholds in force in a running cluster")
    add_connection_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Plans, prints, and puts the plan in force where that is asked; 3 where no plan keeps what is asked.

    Raises:
        CliError: the file has no cascade, something is missing, or the cluster does not take the plan.
    """
    try:
        spec = with_model_folders(read_cluster(arguments.cascade))
        job = job_of_file(spec, arguments)
        files = {tier.step_time: tier.step_time for tier in job.tiers if tier.step_time.endswith(".toml")}
        with working(f"simulating thresholds of {len(job.tiers)} tiers"):
            result = plan_job(job, load_step_times(files)[0], front=True)
    except (ConfigError, ValueError, OSError) as error:
        raise CliError(str(error)) from None
    assert spec.cascade is not None, "job_of_file refuses others"
    print(report(job, result))
    if arguments.apply:
        if result.chosen is None:
            raise CliError("nothing to apply: no thresholds serve that rate on the file's instances")
        told = asyncio.run(_apply(resolve_connection(arguments, operator=True), spec, result))
        print(f"in force: epoch {told.epoch} of {told.cascade}")
    return 0 if result.meets else MISSED


def job_of_file(spec: ClusterSpec, arguments: argparse.Namespace) -> PlanningJob:
    """Build the planning job for a cluster's file.

    Raises:
        CliError, ConfigError: naming what is missing.
    """
    cascade = spec.cascade
    if cascade is None:
        raise CliError(f"{arguments.cascade} has no [cascade]")
    quality, latency_s = arguments.quality, arguments.latency
    if quality is None and latency_s is None:
        quality, latency_s = cascade.quality, cascade.latency_s
    sample = arguments.sample or cascade.sample
    if quality is None and latency_s is None:
        raise CliError("nothing to plan for: give --quality or --latency, or cascade.quality in the file")
    if not sample:
        raise CliError("no recorded answers: give --sample, or cascade.sample in the file")
    if not arguments.rate > 0:
        raise CliError(f"--rate {arguments.rate:g}: must be above 0")
    judges = judge_files(spec)
    models = {model.name: model for model in spec.models}
    tiers = [_tier(spec, models[name], str(judges.get(name, ""))) for name in cascade.tiers]
    return PlanningJob(tiers=tiers, sample=sample, rate=arguments.rate, quality=quality, latency_s=latency_s)


def _tier(spec: ClusterSpec, model: ModelSpec, judge: str) -> PlannedTier:
    """The recording names a model by its folder; engines are assumed to have vLLM's default limits."""
    folder, group = Path(model.path), model.groups[0]
    length = context_length(folder) or EngineParameters().max_model_len
    blocks = max(EngineParameters().blocks_total, -(-length // EngineParameters().block_size))
    return PlannedTier(
        model=model.name,
        recorded=folder.name,
        step_time=_step_time(group, folder),
        parameters=EngineParameters(max_model_len=length, blocks_total=blocks, prefix_caching=False),
        instances=len(instances_of(spec, model)),
        judge=str(folder / judge) if judge else "",
    )


def _step_time(group: GroupSpec, folder: Path) -> str:
    return group.step_time or STEP_TIMES.get(folder.name, "")


def report(job: PlanningJob, result: PlanningResult) -> str:
    """The front, what was chosen, and why."""
    head = f"{'p95 s':>8}{'quality':>9}{'at least':>10}  {'instances':<16}{'thresholds':<20}reach each tier"
    lines = [f"{job.rate:g} requests/s, {sum(tier.instances for tier in job.tiers)} instances", head]
    lines += [_row(point) for point in result.front]
    if result.chosen is not None:
        lines += ["", "for the instances of the file:", _row(result.chosen)]
    if result.best is not None and result.best.instances != [tier.instances for tier in job.tiers]:
        lines += ["", "with as many instances, divided in the best way:", _row(result.best)]
    lines.append(("" if result.meets else "TARGET MISSED: ") + result.reason)
    return "\n".join(lines)


def _row(point: FrontPoint) -> str:
    instances = " ".join(map(str, point.instances))
    thresholds = " ".join(f"{value:.1f}" for value in point.thresholds)
    shares = " ".join(f"{share:.0%}" for share in point.shares)
    return (
        f"{point.p95_s:>8.2f}{point.quality:>9.1f}{point.quality_low:>10.1f}  {instances:<16}{thresholds:<20}{shares}"
    )


def applied(cascade: CascadeSpec, before: CascadePlan | None, result: PlanningResult) -> CascadePlan:
    """The plan to write: the new thresholds, with the instances that the plan in force has."""
    chosen = result.chosen
    assert chosen is not None, "the caller checks"
    instances = {tier.model: tier.instances for tier in before.tiers} if before is not None else {}
    thresholds = [*chosen.thresholds, 0.0]
    tiers = [
        CascadeTier(model=model, threshold=threshold, share=share, instances=instances.get(model, 0))
        for model, threshold, share in zip(cascade.tiers, thresholds, chosen.shares, strict=True)
    ]
    return CascadePlan(
        cascade=cascade.name,
        epoch=before.epoch + 1 if before is not None else 1,
        tiers=tiers,
        judge=policy_name(cascade.judge),
        quality=chosen.quality,
        quality_low=max(0.0, chosen.quality_low),
        p95_ns=round(chosen.p95_s * 1e9),
        meets=result.meets,
        coordinator=OPERATOR,
        reason=f"millrace plan --apply: {result.reason}",
        front=result.front,
    )


async def _apply(connection: ConnectionSettings, spec: ClusterSpec, result: PlanningResult) -> CascadePlan:
    """Writes the plan over the one in force. The coordinator looks after members.

    Raises:
        CliError: the cluster has no such cascade, or cannot be reached.
    """
    cascade = spec.cascade
    assert cascade is not None, "job_of_file refuses others"
    bucket = Subjects(connection.cluster).bucket("cascade")
    try:
        async with open_bus(connection, store=True) as store:
            before = next(
                (plan for plan in _plans(await read_bucket(store, bucket)) if plan.cascade == cascade.name), None
            )
            if before is None or [tier.model for tier in before.tiers] != cascade.tiers:
                raise CliError(f"the running cluster has no cascade {cascade.name} of {', '.join(cascade.tiers)}")
            plan = applied(cascade, before, result)
            await store.jetstream().publish(f"$KV.{bucket}.{subject_token(cascade.name)}", encode(plan))
    except (nats.errors.Error, JetStreamError) as error:
        raise CliError(f"the plan could not be written: {error}") from None
    return plan


def _plans(values: list[bytes]) -> list[CascadePlan]:
    found = []
    for value in values:
        try:
            body = decode(value)
        except MalformedMessage:
            continue
        if isinstance(body, CascadePlan):
            found.append(body)
    return found
