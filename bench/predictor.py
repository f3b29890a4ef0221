"""Value of a predictor's calibration and memory: prediction errors in simulation where its step times are wrong.

Engines follow one step-time set; the predictor is given that one, one that is wrong by a factor, one of other hardware,
or none. Errors are of forecasts for requests placed by the `forecast` policy, lengths known, against what happened.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from millrace.actor.actor import Actor
from millrace.actor.deps import ActorDeps
from millrace.contracts.catalog import Role
from millrace.enginemodel.coefficients import load_step_time
from millrace.enginemodel.step_time_models import StepTimeModel
from millrace.hosting.step_times import StepTimeDeps
from millrace.sim.runtime_sim import SECOND

from services.predictor.actor import PredictorActor
from services.predictor.build import build as build_predictor
from services.predictor.metrics import PredictorMetrics
from simulator.scenarios.cluster import ScenarioCluster
from simulator.scenarios.load import arrivals, call_of
from simulator.scenarios.spec import MODEL, ScenarioSpec

TRUTH = "a30-llama-2-7b"
GROUP = {
    "name": "g",
    "instances": 8,
    "step_time": TRUTH,
    "engine": {
        "max_model_len": 4096,
        "block_size": 16,
        "blocks_total": 1056,
        "max_sequences": 48,
        "token_budget": 512,
        "prefix_caching": False,
    },
}
#: Name -> factor on the true set, other set, or nothing.
SETS: dict[str, float | str] = {
    "right": 1.0,
    "1.5 times too fast": 1 / 1.5,
    "1.5 times too slow": 1.5,
    "4 times too fast": 0.25,
    "an H100's": "h100-llama-2-7b",
    "none": "",
}


class MisledCluster(ScenarioCluster):
    """A cluster whose predictor has a set of its own choice under the name of the engines'."""

    def __init__(
        self, spec: ScenarioSpec, told: dict[str, StepTimeModel], config: dict[str, Any], **fields: Any
    ) -> None:
        self._sets = told
        self._config = config
        super().__init__(spec, **fields)

    @property
    def predictor_metrics(self) -> PredictorMetrics:
        """Of the only predictor."""
        (predictor,) = self.of_role(Role.PREDICTOR)
        actor = predictor.actor
        assert isinstance(actor, PredictorActor)
        return actor.metrics

    def build_actor(self, role: Role, config: Any, deps: ActorDeps) -> Actor:
        """Gives the predictor its own sets and fields of configuration, and a clock."""
        if role is not Role.PREDICTOR:
            return super().build_actor(role, config, deps)
        known = msgspec.structs.replace(config, **self._config)
        return build_predictor(
            known,
            StepTimeDeps(incarnation=deps.incarnation, rng=deps.rng, clock=time.perf_counter_ns, step_times=self._sets),
        )


def main() -> int:
    """Prints one row per set, with and without calibration."""
    parser = argparse.ArgumentParser(prog="python -m bench predictor", description=__doc__)
    parser.add_argument("--count", type=int, default=1_500, help="requests per run")
    parser.add_argument("--rate", type=float, default=16.0, help="requests per second over 8 instances")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.count} requests at {options.rate:g}/s on 8 engines of {TRUTH}\n")
    head = f"{'the predictor has':<20} {'calibrated':>10} {'TTFT error':>11} {'e2e error':>10} {'e2e bias':>9}"
    print(f"{head} {'mean e2e':>9} {'answered':>9} {'scale':>6} {'us':>5}")
    for name, wrong in SETS.items():
        for calibrate in (True, False):
            print(row(options, name, wrong, calibrate=calibrate), flush=True)
    return 0


def row(options: argparse.Namespace, name: str, wrong: float | str, *, calibrate: bool) -> str:
    """One run."""
    cluster = run(options, wrong, calibrate=calibrate)
    metrics, finished = cluster.predictor_metrics, cluster.observer.finished
    ttft = [(each.predicted_ttft_ns, each.ttft_ns) for each in finished if each.predicted_ttft_ns > 0]
    e2e = [(each.predicted_e2e_ns, each.e2e_ns) for each in finished if each.predicted_e2e_ns > 0]
    bias_s = statistics.fmean(predicted - real for predicted, real in e2e) / SECOND if e2e else 0.0
    mean_s = statistics.fmean(each.e2e_ns for each in finished) / SECOND
    scale = statistics.fmean(scale for _, scale, *_ in metrics.instances())
    share = metrics.predictions.counts.get(("predicted",), 0) / max(1, metrics.predictions.total())
    figures = (
        f"{mean_error(ttft):>11} {mean_error(e2e):>10} "
        f"{bias_s:>8.2f}s {mean_s:>8.2f}s {share:>9.1%} {scale:>6.2f} "
        f"{metrics.handling.mean_ns / 1000:>5.0f}"
    )
    return f"{name:<20} {'yes' if calibrate else 'no':>10} {figures}"


def mean_error(pairs: Sequence[tuple[int, int]]) -> str:
    """Mean absolute percentage error of (predicted, real) pairs."""
    return f"{statistics.fmean(abs(p - real) / max(1, real) for p, real in pairs):.1%}" if pairs else "-"


def run(options: argparse.Namespace, wrong: float | str, *, calibrate: bool) -> MisledCluster:
    """Runs every request to its end."""
    spec = msgspec.convert(
        {
            "name": "predictor",
            "seed": options.seed,
            "cluster": {"groups": [GROUP]},
            "dispatch": {"policy": "forecast"},
            "workload": {"count": options.count, "arrivals": {"kind": "poisson", "rate_per_s": options.rate}},
        },
        ScenarioSpec,
    )
    load = arrivals(spec.workload, seed=spec.seed, folders=(Path(),))
    cluster = MisledCluster(
        spec,
        told(wrong),
        {"calibrate": calibrate},
        step_times=load_step_time,
        truth=lambda request, _model: load[int(request[1:])].shape.output_tokens,
    )
    simulation = cluster.simulation
    simulation.run(cluster.begin_ns)
    for number, each in enumerate(load):
        simulation.after(cluster.begin_ns + each.at_ns - simulation.now_ns, arrive, cluster, number, each)
    while cluster.clients.ended < len(load):
        simulation.run_for(SECOND)
    return cluster


def arrive(cluster: MisledCluster, number: int, each: Any) -> None:
    """A call reaches the ingress."""
    process = cluster.ingresses[0].process
    assert process is not None
    cluster.clients.submit(process, call_of(number, each, model=MODEL, max_model_len=4096, output_limit=0))


def told(wrong: float | str) -> dict[str, StepTimeModel]:
    """Return the step times that the predictor finds under the name of the engines' set."""
    if wrong == "":
        return {}
    if isinstance(wrong, str):
        return {TRUTH: load_step_time(wrong)}
    return {TRUTH: load_step_time(TRUTH).times(wrong)}
