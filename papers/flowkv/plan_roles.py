"""Roles and shapes for a cluster's file and a load, by simulation with the engine model.

    python -m papers.flowkv.plan_roles cluster.toml --rate 20

Every assignment of roles (and, where a kind of device has groups of several tensor parallel sizes, of shapes) to the
devices of a model's groups is simulated; the one that keeps the objectives for most requests is printed as groups of
the file. The exit code is 3 where none keeps them for nine requests of ten.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

import msgspec
from millrace.actor.errors import ConfigError
from millrace.cli.errors import CliError
from millrace.cli.progress import working
from millrace.cluster.engine_limits import engine_parameters
from millrace.cluster.model_folders import with_model_folders
from millrace.cluster.reading import read_cluster
from millrace.cluster.spec import ClusterSpec, GroupSpec, ModelSpec
from millrace.enginemodel.forecast.question import ReplicaRequest
from millrace.enginemodel.network import TOKEN_BYTES
from millrace.enginemodel.registered import load_step_times
from millrace.enginemodel.step_time_models import StepTimeModel
from millrace.supervision.service_fields import STEP_TIMES
from millrace.workloads.arrivals import Poisson
from millrace.workloads.lengths import load_fitted
from millrace.workloads.shape import WorkloadError

from papers.flowkv.assignment import AssignmentTargets, RatedAssignment, assign
from papers.flowkv.mix import InstanceShape

#: Exit code where no assignment keeps the objectives for nine requests of ten.
MISSED = 3
WITHIN_MIN = 0.9

#: Requests that are simulated per candidate.
REQUESTS = 200

#: Candidates printed.
SHOWN_MAX = 8


def main(words: Sequence[str]) -> int:
    """Plans and prints; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="papers.flowkv.plan_roles", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("roles", metavar="FILE", help="a cluster's file")
    add("--rate", type=float, required=True, metavar="N", help="requests per second")
    add("--model", default="", help="the model, where the file has several")
    add("--lengths", default="azure-conversation", help="a set that ships (default: %(default)s)")
    add("--ttft", type=float, default=2.0, metavar="S", help="objective, seconds (default: %(default)s)")
    add("--tpot", type=float, default=0.05, metavar="S", help="objective, seconds (default: %(default)s)")
    add("--bandwidth", type=float, default=100.0, metavar="GBPS", help="of a hand-off (default: 100)")
    add("--seed", type=int, default=0, help="of the sample (default: 0)")
    try:
        return plan_roles(parser.parse_args(words))
    except CliError as error:
        print(f"plan_roles: {error}", file=sys.stderr)
        return 1


def plan_roles(arguments: argparse.Namespace) -> int:
    """Simulates every assignment, and prints the best ones and the groups of the best.

    Raises:
        CliError: the file, the load or a step-time set is missing or wrong.
    """
    if not arguments.rate > 0:
        raise CliError(f"--rate {arguments.rate:g}: must be above 0")
    try:
        spec = with_model_folders(read_cluster(arguments.roles))
        model = _model(list(spec.models), arguments.model)
        files = {group.step_time: group.step_time for group in model.groups if group.step_time.endswith(".toml")}
        sets = load_step_times(files)[0]
        shapes = [
            _shape(spec, model, group=group, sets=sets, bandwidth_gbps=arguments.bandwidth) for group in model.groups
        ]
        limit = min(shape.parameters.max_model_len for shape in shapes)
        targets = AssignmentTargets(ttft_s=arguments.ttft, tpot_s=arguments.tpot)
        requests = load(arguments.lengths, arguments.rate, limit, arguments.seed)
        with working(f"simulating assignments, {len(requests)} requests each"):
            rated = assign(requests, shapes, devices(model), targets)
    except (ConfigError, WorkloadError, ValueError, OSError) as error:
        raise CliError(str(error)) from None
    print(report(rated))
    return 0 if rated[0].within >= WITHIN_MIN else MISSED


def _model(models: list[ModelSpec], name: str) -> ModelSpec:
    found = [model for model in models if not name or model.name == name]
    if len(found) != 1:
        known = ", ".join(model.name for model in models)
        raise CliError(f"--model {name}: one of {known}" if name else f"several models, name one with --model: {known}")
    return found[0]


def devices(model: ModelSpec) -> dict[str, int]:
    """Devices of each kind that a model's instances take."""
    found: Counter[str] = Counter()
    for group in model.groups:
        found[group.device] += group.size * group.tensor_parallel
    return dict(found)


def _shape(
    spec: ClusterSpec, model: ModelSpec, *, group: GroupSpec, sets: Mapping[str, StepTimeModel], bandwidth_gbps: float
) -> InstanceShape:
    """The shape of a group. Limits that its settings do not name are those of the engine model."""
    folder = Path(model.path)
    name = group.step_time or STEP_TIMES.get(folder.name, "")
    if name not in sets:
        raise CliError(f"group {group.name}: step_time {name!r} is unknown; `millrace profile` measures one")
    parameters = msgspec.structs.replace(engine_parameters(spec, model, group), prefix_caching=False)
    return InstanceShape(
        name=f"{group.device}-tp{group.tensor_parallel}" if group.tensor_parallel > 1 else group.device,
        device=group.device,
        devices=group.tensor_parallel,
        cost=sets[name].cost(parameters),
        parameters=parameters,
        token_transfer_ns=round(8 * TOKEN_BYTES / bandwidth_gbps),
    )


def load(lengths: str, rate: float, limit: int, seed: int) -> list[ReplicaRequest]:
    """A sample of requests: lengths of a set that ships, cut to what an engine takes, and Poisson arrivals.

    Raises:
        WorkloadError: there is no such set.
    """
    source, rng = load_fitted(lengths), Random(f"{seed}/roles")
    times = Poisson(rate_per_s=rate).times_ns(Random(f"{seed}/arrivals"))
    found = []
    for _ in range(REQUESTS):
        shape = source.draw(rng)
        prompt = min(shape.prompt_tokens, limit // 2)
        found.append(ReplicaRequest(next(times), prompt, min(shape.output_tokens, limit - prompt - 1)))
    return found


def report(rated: list[RatedAssignment]) -> str:
    """A line for each of the best assignments, and the groups of the first as a file has them."""
    lines = [f"{len(rated)} assignments simulated, {REQUESTS} requests each"]
    lines.append(f"{'within':>8}{'TTFT s':>9}{'TPOT ms':>9}{'e2e s':>8}  assignment")
    lines += [
        f"{each.within:>8.1%}{each.ttft_s:>9.2f}{each.tpot_s * 1e3:>9.1f}{each.e2e_s:>8.2f}  {each.name}"
        for each in rated[:SHOWN_MAX]
    ]
    lines.append("\nthe first one as groups of the file:")
    for member in rated[0].mix:
        shape = member.shape
        lines.append(
            f'[[models.groups]]\ncount = {member.count}\ndevice = "{shape.device}"\n'
            f'tensor_parallel = {shape.devices}\nrole = "{member.role}"'
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
