"""Measured runs of H100 and H200 servers against step times: two thirds of the rows to fit on, a third to judge by.

A row is a run at constant concurrency B: prompts of ``isl``, outputs of ``osl`` tokens. In the steady state each
request's life holds ``osl`` steps with B sequences, and the prompts of B requests: its end-to-end time is the sum of
these steps whatever the order in which the server runs them. TTFT alone is a matter of that order and of queues, and is
not judged.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

import msgspec
import numpy as np
from millrace.contracts.status import BatchComposition
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_cost import FS_PER_NS, StepCost
from millrace.profiling.fitting import non_negative

from bench.published.engines import published, published_names

FS_PER_MS = FS_PER_NS * 1e6
ROWS_MIN = 12  # of a group: fewer leave nothing to judge by
SEED = 0
BUDGET = 8192
#: Bytes of HBM beside weights that hold KV, per GPU, roughly: runs that need more queue, and are left out.
KV_BYTES = {"Llama-3.1-8B": 131_072, "Qwen3-32B": 262_144}
WEIGHT_BYTES = {"Llama-3.1-8B": 16e9, "Qwen3-32B": 66e9}
USABLE_BYTES = 70e9


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A measured run; times in ms."""

    model: str
    system: str
    backend: str
    precision: str
    ways: int
    batch: int
    prompt: int
    output: int
    ttft: float
    tpot: float

    @property
    def e2e(self) -> float:
        """Of a request."""
        return self.ttft + self.tpot * (self.output - 1)

    @property
    def context(self) -> int:
        """Mean context of a sequence over its life."""
        return self.prompt + self.output // 2


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of a group's held-out rows.

    Attributes:
        solution: Factor on kernels, ns of each step and of each sequence in it; empty for other forms.
    """

    name: str
    fitted: int
    errors: list[float]
    uncalibrated: list[float] = []
    solution: tuple[float, ...] = ()

    def said(self) -> str:
        """One line of the table."""
        raw = f"{_mape(self.uncalibrated):12.1%}" if self.uncalibrated else f"{'':12}"
        line = f"{self.name:<50}{self.fitted:>7}{len(self.errors):>9}{_mape(self.errors):>9.1%}{raw}"
        if not self.solution:
            return line
        kernels, step, sequence = self.solution
        return f"{line}{kernels:9.2f}{step:9.2f}{1e3 * sequence:9.1f}"


def report(data: Path) -> None:
    """Both tables."""
    runs = read(data / "aiconfigurator_silicon_e2e" / "silicon_sample_h100_h200.csv")
    title = f"{'':<50}{'fitted':>7}{'held out':>9}{'MAPE':>9}{'untouched':>12}"
    solved = f"{'kernels':>9}{'host ms':>9}{'us/seq':>9}"
    print("end-to-end time of a request from kernel tables; host and a factor on kernels, at least 1, fitted")
    print(title + solved)
    _print([each for each in (from_tables(key, group, data) for key, group in groups(runs).items()) if each])
    print(f"\nthe same from the linear form fitted to each group's runs\n{title}")
    _print([each for each in (from_features(key, group) for key, group in groups(runs).items()) if each])


def _print(results: list[Result]) -> None:
    for result in results:
        print(result.said())
    errors = [error for result in results for error in result.errors]
    raw = [error for result in results for error in result.uncalibrated]
    print(Result(name="all", fitted=sum(each.fitted for each in results), errors=errors, uncalibrated=raw).said())


def read(path: Path) -> list[Run]:
    """Runs of servers that do prefill and decode together."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["mode"] == "agg" and int(row["pp_size"]) == 1]
    return [
        Run(
            model=row["model_path"],
            system=row["system"],
            backend=row["backend"],
            precision=row["precision"] or "bf16",
            ways=int(row["tp_size"]),
            batch=int(row["batch_size"]),
            prompt=int(row["isl"]),
            output=int(row["osl"]),
            ttft=float(row["silicon_ttft_ms"]),
            tpot=float(row["silicon_tpot_ms"]),
        )
        for row in rows
        if row["silicon_ttft_ms"] and row["silicon_tpot_ms"] and int(row["osl"]) > 1
    ]


def groups(runs: list[Run]) -> dict[tuple[str, ...], list[Run]]:
    """Runs of the same server, those with enough rows."""
    found: dict[tuple[str, ...], list[Run]] = defaultdict(list)
    for run in runs:
        found[run.model.split("/")[-1], run.system, run.backend, run.precision, f"tp{run.ways}"].append(run)
    return {key: group for key, group in sorted(found.items()) if len(group) >= ROWS_MIN}


def from_tables(key: tuple[str, ...], group: list[Run], data: Path) -> Result | None:
    """Kernel tables, with a factor on them and the host's time for each step and sequence fitted.

    In a server no kernel is faster than alone, so that the factor is at least 1. Without that bound it is 0.56 to 0.88
    on 4 and 8 GPUs, with up to 2.9 ms of host: tables that are too slow for a shard (all-reduces are NCCL's, which
    servers replace by their own for small messages) and a host's time that makes up for it.
    """
    cost = _tables(key, data)
    if cost is None:
        return None
    group = [run for run in group if _fits(run)]
    kernels = np.array([_life_ms(run, cost) for run in group])
    rows = np.array([[ms, run.output, run.output * run.batch] for ms, run in zip(kernels, group, strict=True)])
    result = _judged(key, rows, group, least=np.array([1.0, 0.0, 0.0]))
    raw = [float(kernels[index] / group[index].e2e - 1.0) for index in _held_out(len(group))]
    return msgspec.structs.replace(result, uncalibrated=raw)


def _tables(key: tuple[str, ...], data: Path) -> StepCost | None:
    model, system, _, precision, ways = key
    if system != "h100_sxm" or precision != "bf16":
        return None  # the tables are of 16 bits
    family = {"Llama-3.1-8B-Instruct": "llama-3-8b", "Qwen3-32B": "qwen3-32b"}.get(model)
    name = f"h100-{family}" + ("" if ways == "tp1" else f"-{ways}")
    if name not in published_names():
        return None
    return published(name, data).cost(EngineParameters(max_sequences=512, token_budget=BUDGET))


def _fits(run: Run) -> bool:
    """Whether the KV of all sequences fits into memory."""
    name = next(name for name in KV_BYTES if name in run.model)
    return run.batch * (run.prompt + run.output) * KV_BYTES[name] < run.ways * USABLE_BYTES - WEIGHT_BYTES[name]


def _life_ms(run: Run, cost: StepCost) -> float:
    """Steps of a request's life: its output's, and what the prompts of a full batch add to them."""
    others = run.batch - 1
    alone = _ms(cost, BatchComposition(decodes=others, context_tokens=others * run.context))
    with_prompt = _ms(
        cost,
        BatchComposition(
            decodes=others,
            prefills=1,
            prefill_tokens=run.prompt,
            context_tokens=others * run.context + run.prompt,
            prefill_context_tokens=run.prompt,
            prefill_work=run.prompt**2 / 2,
        ),
    )
    step = _ms(cost, BatchComposition(decodes=run.batch, context_tokens=run.batch * run.context))
    return run.output * step + run.batch * (with_prompt - alone)


def _ms(cost: StepCost, batch: BatchComposition) -> float:
    return cost.duration_fs(batch) / FS_PER_MS


def from_features(key: tuple[str, ...], group: list[Run]) -> Result:
    """The features of LinearStepTime summed over a request's life."""
    rows = np.array(
        [
            [
                run.output,
                run.output * run.batch,
                run.batch * run.prompt,
                run.output * run.batch * run.context,
                run.batch * run.prompt**2 / 2,
            ]
            for run in group
        ],
        dtype=float,
    )
    return _judged(key, rows, group)


def _judged(key: tuple[str, ...], rows: np.ndarray, group: list[Run], *, least: np.ndarray | None = None) -> Result:
    """Fits on two thirds, and gives the errors of the rest. ``least``: of each coefficient, 0 without."""
    out = _held_out(len(group))
    rest = [index for index in range(len(group)) if index not in set(out)]
    times = np.array([run.e2e for run in group])
    relative = rows[rest] / times[rest, None]
    solution = non_negative(relative, rounds=15, known=None if least is None else relative @ least)
    if least is not None:
        solution = solution + least
    return Result(
        name=" ".join(key),
        fitted=len(rest),
        errors=[float(each) for each in rows[out] @ solution / times[out] - 1.0],
        solution=() if least is None else tuple(float(each) for each in solution),
    )


def _held_out(count: int) -> list[int]:
    """A third of the rows, chosen at random."""
    return sorted(int(index) for index in np.random.default_rng(SEED).permutation(count)[: count // 3])


def _mape(errors: list[float]) -> float:
    return float(np.mean(np.abs(errors))) if errors else float("nan")
