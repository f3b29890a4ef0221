"""Planned latency of a cascade against the full actor simulation, and step times of 70B models against published runs.

The actors are simulated tier after tier: a tier's ends, with its scores, are the next tier's arrivals. 8B and 70B (FP8)
on 16 H100s. Aims: planned p95 within 10 %; 70B step times within 10 % of published rows that they were not fitted on.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from millrace.cascade.chain import NS
from millrace.cascade.sample import JudgedSample
from millrace.contracts.status import BatchComposition
from millrace.enginemodel.coefficients import load_step_time
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_cost import FS_PER_NS, StepCost
from millrace.profiling.fitting import non_negative
from millrace.workloads.arrivals import FromTrace

from bench.engine.fit_silicon import SERVERS, fitted, told
from bench.published.engines import composed
from bench.published.shapes import H100_BYTES, LLAMA_3_8B, LLAMA_3_70B
from bench.published.tables import H100
from papers.cascadia.bench.cascade_models import DATA, TABLES, fp8_70b, has_data
from papers.cascadia.bench.cascade_slo import JUDGE_S, Setting, planner_of, rate_of
from papers.cascadia.bench.cascade_traces import NOTE, PAIR, poisson, wildbench
from papers.cascadia.capacity import TierDeployment
from papers.cascadia.planner import CascadeDesign
from papers.cascadia.replicas import ReplicaShape
from simulator.scenarios.running import run_scenario
from simulator.scenarios.spec import (
    ClusterTable,
    DispatchSpec,
    Group,
    ScenarioSpec,
    TraceRows,
    WorkloadSpec,
)

GPUS = 16
QUALITIES = (0.97, 0.94)
REQUESTS = 1000
POLICIES = ("round_robin", "join_shortest_queue")
#: Names of the sets of each tier's shapes, by GPUs.
SMALL_SET, LARGE_SET = "h100-llama-3-8b", "h100-llama-3.1-70b-fp8-tp{}"
FS_PER_MS = FS_PER_NS * 1e6


def main() -> int:
    """Print both parts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--parts", nargs="+", choices=["steps", "chain"], default=["steps", "chain"])
    options = parser.parse_args()
    if not has_data():
        print("cascade_fidelity: the published tables and scores are not here (MILLRACE_DATA)")
        return 0
    if "steps" in options.parts:
        _fp8()
        _sixteen_bits(options.seeds)
    if "chain" in options.parts:
        _chain(options.seeds)
    return 0


def _fp8() -> None:
    print("end-to-end time of published runs, held-out third, mean of 5 splits")
    for server in SERVERS:
        found = fitted(server, DATA)
        print(f"  {server.title:<24} {server.hardware:<16} {server.backend:<7} {found.runs} runs: {told(found.errors)}")


class Row(NamedTuple):
    """A row of Splitwise's measurements with what the tables say, ms."""

    ways: int
    config: tuple[int, ...]
    prefill: float
    decode: float
    prompt_ms: float
    token_ms: float


def _sixteen_bits(seeds: int) -> None:
    """Kernel tables of 70B in 16 bits against Splitwise's rows: a factor and the host's time fitted for each TP."""
    print(
        "Llama-2-70B, 16 bits, H100: kernel tables against Splitwise's rows (vLLM of 2023); a factor of at least 1 and"
    )
    print("the host's time for each TP fitted on two thirds of the configurations, errors of the rest")
    for ways in (2, 4, 8):
        rows = [row for row in _splitwise() if row.ways == ways]
        for name, model, measured in (
            ("prompt", [row.prefill for row in rows], [row.prompt_ms for row in rows]),
            ("token", [row.decode for row in rows], [row.token_ms for row in rows]),
        ):
            raw = statistics.fmean(abs(at / ms - 1) for at, ms in zip(model, measured, strict=True))
            errors = [_calibrated(rows, np.array(model), np.array(measured), seed) for seed in range(seeds)]
            print(f"  TP{ways} {name:<7} untouched {raw:6.1%}, held out {told(tuple(errors))}")


def _calibrated(rows: Sequence[Row], model: np.ndarray, measured: np.ndarray, seed: int) -> float:
    configs = sorted({row.config for row in rows})
    out = set(np.random.default_rng(seed).permutation(len(configs))[: len(configs) // 3].tolist())
    held = np.array([configs.index(row.config) in out for row in rows])
    features = np.column_stack([model, np.ones(len(rows)), [row.config[1] for row in rows]])
    relative, least = features[~held] / measured[~held, None], np.array([1.0, 0.0, 0.0])
    solution = least + non_negative(relative, rounds=15, known=relative @ least)
    return float(np.mean(np.abs(features[held] @ solution / measured[held] - 1)))


@cache
def _splitwise() -> list[Row]:
    """H100 rows of llama2-70b whose KV fits: at TP2 not 64 prompts at once."""
    path = DATA / "splitwise_perf_model" / "perf_model.csv"
    table = csv.DictReader(path.open(encoding="utf-8"))
    found = []
    for row in table:
        ways, batch = int(row["tensor_parallel"]), int(row["batch_size"])
        if (row["model"], row["hardware"]) != ("llama2-70b", "h100-80gb") or (ways == 2 and batch == 64):
            continue
        prompt, output = int(row["prompt_size"]), int(row["token_size"])
        cost = _tables(ways)
        context = batch * (prompt + output // 2)
        found.append(
            Row(
                ways=ways,
                config=(prompt, batch, output),
                prefill=batch * _ms(cost, _prompt(prompt)),
                decode=_ms(cost, BatchComposition(decodes=batch, context_tokens=context)),
                prompt_ms=float(row["prompt_time"]),
                token_ms=float(row["token_time"]),
            )
        )
    return found


def _prompt(tokens: int) -> BatchComposition:
    return BatchComposition(
        prefills=1,
        prefill_tokens=tokens,
        context_tokens=tokens,
        prefill_context_tokens=tokens,
        prefill_work=tokens**2 / 2,
    )


def _ms(cost: StepCost, batch: BatchComposition) -> float:
    return cost.duration_fs(batch) / FS_PER_MS


@cache
def _tables(ways: int) -> StepCost:
    shape = msgspec.structs.replace(LLAMA_3_70B, name="Llama-2-70B, float16", vocabulary=32_000)
    tables = composed(DATA, shape=shape, hardware=H100, tables_of=TABLES[H100.name], ways=ways)
    return tables.cost(EngineParameters(max_sequences=64, token_budget=8192))


def _chain(seeds: int) -> None:
    setting = Setting("8B and 70B (FP8) on 16 H100", GPUS, [_small(), fp8_70b(H100)], PAIR)
    print(f"\n{setting.name}, all actors simulated, tier after tier; {NOTE.format(', '.join(PAIR))}")
    print(f"{'quality':>8}{'load/s':>8}{'planned s':>11}  p95 of the actors over the planned one: mean (least to most)")
    for share in QUALITIES:
        planned, rates, text = [], [], ""
        ratios: dict[str, list[float]] = {policy: [] for policy in POLICIES}
        for seed in range(seeds):
            sample = wildbench(seed, PAIR)
            rate = rate_of(setting, sample, seed)
            plan = planner_of(setting, sample, rate, share * float(sample.quality[:, -1].mean()), seed).plan()
            assert plan is not None, "the load can be served"
            planned.append(plan.p95_s)
            rates.append(rate)
            text = text or " | ".join(each.text() for each in plan.deployments)
            for policy in POLICIES:
                ratios[policy].append(_simulated_p95_s(plan, sample, rate, policy, seed) / plan.p95_s)
        line = "; ".join(
            f"{policy} {np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"
            for policy, values in ratios.items()
        )
        print(f"{share:>8.0%}{np.mean(rates):>8.2f}{np.mean(planned):>11.2f}  {line}; seed 0: {text}", flush=True)


@cache
def _small() -> tuple[ReplicaShape, ...]:
    """8B on one H100, by the set that ships: the simulated engines have the same."""
    blocks = LLAMA_3_8B.kv_tokens(gpus=1, memory_bytes=H100_BYTES) // 16
    parameters = msgspec.structs.replace(fp8_70b(H100)[0].parameters, blocks_total=blocks, max_sequences=256)
    return (ReplicaShape(tensor=1, cost=load_step_time(SMALL_SET).cost(parameters), parameters=parameters),)


def _simulated_p95_s(plan: CascadeDesign, sample: JudgedSample, rate: float, policy: str, seed: int) -> float:
    rng = np.random.default_rng([seed, 3])
    rows = sample.rows(rng.integers(0, sample.count, REQUESTS))
    arrivals = poisson(rate, REQUESTS, seed + 50)
    ready, open_ = list(arrivals), list(range(REQUESTS))
    for tier, name in enumerate((SMALL_SET, LARGE_SET)):
        open_.sort(key=lambda index: ready[index])
        if not open_ or not plan.deployments[tier].replicas:
            continue
        requests = [(ready[i], int(rows.prompt_tokens[i, tier]), int(rows.output_tokens[i, tier])) for i in open_]
        for index, took in zip(open_, _actors(requests, plan.deployments[tier], name, policy), strict=True):
            ready[index] += took + (int(JUDGE_S * NS) if tier == 0 else 0)
        if tier == 0:
            open_ = [index for index in open_ if rows.scores[index, 0] < plan.routed.thresholds[0]]
    return float(np.percentile(np.array(ready) - np.array(arrivals), 95)) / NS


def _actors(requests: Sequence[tuple[int, int, int]], deployment: TierDeployment, name: str, policy: str) -> list[int]:
    """End-to-end time of each request, ns, with the real actors on simulated engines."""
    groups = tuple(
        Group(name=shape.name, instances=count, step_time=name.format(shape.tensor), engine=shape.parameters)
        for shape, count in deployment.replicas
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "requests.jsonl"
        lines = (
            json.dumps({"timestamp": at / 1e6, "input_length": prompt, "output_length": output, "hash_ids": []})
            for at, prompt, output in requests
        )
        path.write_text("\n".join(lines))
        rows = TraceRows(path=str(path), format="mooncake", prefixes=False)
        spec = ScenarioSpec(
            cluster=ClusterTable(groups=groups),
            dispatch=DispatchSpec(policy=policy),
            workload=WorkloadSpec(arrivals=FromTrace(), lengths=rows, count=len(requests)),
        )
        outcome = run_scenario(spec, step_times=load_step_time, folders=(path.parent,))
    took = {each.number: each.e2e_ns for each in outcome.finished if each.e2e_ns >= 0}
    assert len(took) == len(requests), f"{len(requests) - len(took)} requests were not answered"
    return [took[index] for index in range(len(requests))]


def _range(values: Sequence[float]) -> str:
    return f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"
