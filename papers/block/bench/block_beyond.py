"""Beyond Block's paper: other traces, bursts, unequal hardware, wrong lengths, old snapshots; forecast and heuristics.

    python -m bench block_beyond --rows FILE
    python -m bench block_beyond --parts traces --requests 1000 --seeds 1
    python -m bench block_beyond --parts traces --traces Mooncake --requests 2000

Parts: ``traces`` (Azure conversation and code, Mooncake conversation with prefix hits on few instances and on many,
ServeGen R1, each at its own times, sped up to a share of the fluid bound; ``forecast blind`` knows of no prefix),
``bursts`` (gamma arrivals), ``mixed`` (half of the instances twice as
fast), ``noise`` (lengths predicted wrongly) and ``age`` (how old snapshots and summaries are).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from statistics import mean

import msgspec

from bench.scenarios.rows import Row, select
from bench.scenarios.runs import Job, Options, add_options, options, run_all
from bench.scenarios.scenarios import FRESH, data_folder, scenario, stand_in
from bench.scenarios.tables import gains_table, latency_table
from papers.block.bench.bound import fluid_bound
from papers.block.bench.noise import BLOCK_SIGMA
from papers.block.bench.pictures import PANELS, draw
from papers.block.bench.variants import policy_settings
from simulator.scenarios.load import arrivals
from simulator.scenarios.spec import ScenarioSpec

#: Where engines cache prefixes: what it is worth to know them, and to ask but eight.
PREFIX_POLICIES = ("forecast blind", "forecast waiting", "forecast d=8")
POLICIES = ("round robin", "shortest queue", "Llumnix- (code)", "forecast", "forecast*")

#: The best heuristic of the paper and of most tables here.
BASELINE = "Llumnix- (code)"


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """A workload and the cluster for it.

    Attributes:
        load: Share of the fluid bound, which knows of no prefix hits, at which it is played.
    """

    step_time: str
    blocks: int
    length_max: int
    lengths: str
    load: float
    caching: bool = False
    instances: int = 4

    def settings(self) -> list[str]:
        """On top of block.toml: engines as vLLM is configured by default."""
        engine = (
            f"max_model_len={self.length_max}, blocks_total={self.blocks}, max_sequences=256, token_budget=2048, "
            f"watermark=0.01, prefix_caching={str(self.caching).lower()}"
        )
        return [
            f'cluster.groups=[{{name="gpu", instances={self.instances}, step_time="{self.step_time}", '
            f"engine={{{engine}}}}}]",
            f"workload.lengths={{{self.lengths}, total_max={self.length_max - 1}}}",
            'workload.arrivals={kind="trace"}',
        ]


TRACES = {
    "Azure conversation": Trace(
        step_time="a100-llama-3-8b",
        blocks=9_000,
        length_max=16_384,
        lengths='kind="trace", format="azure", path="azure_llm_2023/AzureLLMInferenceTrace_conv.csv"',
        load=0.8,
    ),
    "Azure code": Trace(
        step_time="a100-llama-3-8b",
        blocks=9_000,
        length_max=16_384,
        lengths='kind="trace", format="azure", path="azure_llm_2023/AzureLLMInferenceTrace_code.csv"',
        load=0.5,
    ),
    "Mooncake conversation": Trace(
        step_time="h100-llama-3-8b",
        blocks=27_000,
        length_max=131_072,
        lengths='kind="trace", format="mooncake", path="mooncake_fast25/conversation_trace.jsonl"',
        load=0.8,
        caching=True,
    ),
    "Mooncake conversation, many instances": Trace(
        step_time="h100-llama-3-8b",
        blocks=27_000,
        length_max=131_072,
        lengths='kind="trace", format="mooncake", path="mooncake_fast25/conversation_trace.jsonl"',
        load=0.8,
        caching=True,
        instances=16,
    ),
    "ServeGen R1": Trace(
        step_time="h100-llama-3-8b",
        blocks=27_000,
        length_max=65_536,
        lengths='kind="trace", format="servegen", path="servegen_deepseek_r1"',
        load=0.8,
    ),
}

#: Six instances as on the testbed, six twice as fast.
MIXED = (
    "cluster.groups.0.instances=6",
    "cluster.groups.0.name=slow",
)
BURST_RATE, BURST_CVS = 26.0, (1.0, 2.0, 4.0)
MIXED_POLICIES = (*POLICIES, "forecast waiting", "forecast ttft", "forecast + others")
MIXED_RATES = (36.0, 42.0, 46.0)
NOISE_RATE, NOISES = 31.0, (0.0, 0.1, 0.25, 0.5, 1.0)
AGE_RATE, AGES_MS = 31.0, (20, 100, 250, 500)


def main() -> int:
    """Runs the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, requests=3_000, seeds=3)
    parts: dict[str, Callable[[Options], None]] = {
        "traces": lambda chosen: _traces(chosen, arguments.traces),
        "bursts": _bursts,
        "mixed": lambda chosen: _mixed(chosen, arguments.rates),
        "noise": _noise,
        "age": _age,
    }
    parser.add_argument("--parts", nargs="+", choices=list(parts), default=list(parts))
    parser.add_argument("--rates", nargs="+", type=float, default=MIXED_RATES, help="of the part mixed, requests/s")
    parser.add_argument("--traces", default="", help="of the part traces, those whose name begins so")
    arguments = parser.parse_args()
    chosen = options(arguments)
    print(chosen.told)
    for name in arguments.parts:
        parts[name](chosen)
    return 0


def _traces(chosen: Options, begins: str) -> None:
    for name, trace in TRACES.items():
        jobs: list[Job] = []
        if not name.startswith(begins):
            continue
        if stand_in(_spec(chosen, trace.settings())):
            print(f"\n{name}: skipped, its trace is not under MILLRACE_DATA")
            continue
        for seed in range(chosen.seeds):
            # A seed is another part of the trace; ServeGen's is another draw.
            skip = 0 if "servegen" in trace.lengths else seed * chosen.requests
            part = [f"seed={seed}", f"workload.lengths.skip={skip}"]
            rate, speed = played(_spec(chosen, [*trace.settings(), *part]), trace.load)
            times = f'workload.arrivals={{kind="trace", speed={speed}}}'
            for policy in (*POLICIES, *PREFIX_POLICIES) if trace.caching else POLICIES:
                settings = [*trace.settings(), *part, times, *policy_settings(policy, BLOCK_SIGMA)]
                jobs.append(Job(label=policy, rate=rate, spec=_spec(chosen, settings)))
        rates = sorted({job.rate for job in jobs})
        title = f"{name}, {rates[0]:.1f} to {rates[-1]:.1f} requests/s on {trace.instances} x {trace.step_time}"
        _print(f"{title}, {trace.load:.0%} of the fluid bound", run_all(jobs, chosen))


def played(spec: ScenarioSpec, load: float) -> tuple[float, float]:
    """The rate of a trace at a share of the fluid bound, and how much faster than its own that is."""
    own = arrivals(spec.workload, seed=spec.seed, folders=(data_folder(),))
    natural = (len(own) - 1) / ((own[-1].at_ns - own[0].at_ns) / 1e9)
    rate = load * fluid_bound(spec, [each.shape for each in own])
    return rate, round(rate / natural, 3)


def _bursts(chosen: Options) -> None:
    for cv in BURST_CVS:
        times = f'workload.arrivals={{kind="gamma", rate_per_s={BURST_RATE}, cv={cv}}}'
        jobs = [
            job
            for policy in POLICIES
            for job in chosen.variations(policy, cv, _spec(chosen, [times, *policy_settings(policy, BLOCK_SIGMA)]))
        ]
        _print(f"Testbed, {BURST_RATE:g} requests/s, gamma arrivals with cv {cv:g}", run_all(jobs, chosen))


def _mixed(chosen: Options, rates: Sequence[float]) -> None:
    rows: list[Row] = []
    for rate in rates:
        jobs = [
            job
            for policy in MIXED_POLICIES
            for job in chosen.variations(policy, rate, _halves(chosen, rate, policy_settings(policy, BLOCK_SIGMA)))
        ]
        rows += run_all(jobs, chosen)
        _print(f"6 instances as on the testbed and 6 twice as fast, {rate:g} requests/s", rows[-len(jobs) :])
    _say(draw("block-mixed", rows, axis="requests/s").name)


def _halves(chosen: Options, rate: float, settings: Sequence[str]) -> ScenarioSpec:
    spec = _spec(chosen, [*MIXED, f"workload.arrivals.rate_per_s={rate}", *settings])
    (slow,) = spec.cluster.groups
    fast = msgspec.structs.replace(slow, name="fast", speed=2.0)
    cluster = msgspec.structs.replace(spec.cluster, groups=(slow, fast))
    return msgspec.structs.replace(spec, cluster=cluster)


def _noise(chosen: Options) -> None:
    jobs: list[Job] = []
    for sigma in NOISES:
        noisy = ["prediction.kind=noisy", f"prediction.sigma={sigma}"]
        settings = [f"workload.arrivals.rate_per_s={NOISE_RATE}", *policy_settings("forecast", 0.0), *noisy]
        jobs += chosen.variations("predicted", sigma, _spec(chosen, settings))
    unknown = [
        f"workload.arrivals.rate_per_s={NOISE_RATE}",
        *policy_settings("forecast", 0.0),
        "prediction.kind=none",
    ]
    jobs += chosen.variations("nothing known", 0.0, _spec(chosen, unknown))
    rows = run_all(jobs, chosen)
    told = [msgspec.structs.replace(row, label=f"{row.label}, noise {row.rate:.0%}") for row in rows]
    _print(
        f"Testbed, {NOISE_RATE:g} requests/s, forecast by predicted lengths with noise, and two rules",
        told,
        "plus ten, noise 0%",
    )
    _say(draw("block-noise", rows, axis="noise of predicted lengths", panels=PANELS[:3], labels=_RULES).name)


_RULES = ("plus ten", "survival")


def _age(chosen: Options) -> None:
    jobs: list[Job] = []
    for age_ms in AGES_MS:
        ages = [f"intervals.status_ms={age_ms}", f"intervals.summary_ms={age_ms}"]
        for policy in POLICIES[1:4]:
            settings = [f"workload.arrivals.rate_per_s={AGE_RATE}", *policy_settings(policy, BLOCK_SIGMA), *ages]
            jobs += chosen.variations(policy, float(age_ms), _spec(chosen, settings))
    rows = run_all(jobs, chosen)
    told = [msgspec.structs.replace(row, label=f"{row.label}, {row.rate:g} ms") for row in rows]
    title = f"Testbed, {AGE_RATE:g} requests/s, snapshots and summaries at most every so often"
    _print(title, told, f"forecast, {AGES_MS[0]} ms")


def _spec(chosen: Options, settings: Sequence[str]) -> ScenarioSpec:
    return scenario("block", [f"workload.count={chosen.requests}", *FRESH, *settings])


def _print(title: str, rows: Sequence[Row], baseline: str = BASELINE) -> None:
    labels = list(dict.fromkeys(row.label for row in rows))
    print(f"\n{title}")
    print(latency_table(labels, rows))
    if baseline in labels:
        print("paired by seed:")
        print(gains_table(rows, labels, baseline))
    if any(row.prefix_share for row in rows):
        print("prefix hits, share of the prompt tokens (and how much of them forecasts had wrong):")
        print("\n".join(f"{label:<17}{_hits(select(rows, label))}" for label in labels))


def _hits(rows: Sequence[Row]) -> str:
    """Mean over seeds."""
    wrong = [row.prefix_error for row in rows if row.prefix_error is not None]
    told = f" ({mean(wrong):.1%})" if wrong else ""
    return f"{mean(row.prefix_share for row in rows):.1%}{told}"


def _say(drawn: str) -> None:
    print(f"drawn: {drawn}", file=sys.stderr)
