"""Fits the weights of FlowKV's load scores, which the paper does not give, by regression on simulated runs.

    python -m bench flowkv_weights --rows FILE --write

`examples/scenarios/roles.toml` with each static split and with all instances doing both, at three speeds of the trace.
A row is an instance over five seconds: its indicators, and what its requests felt in the five seconds after: mean TTFT
of those placed there, mean time per token of those that decoded there, each over its objective (5 s, 25 ms) and cut at
FELT_MAX. Weights are the least squares that are not negative, so a score of 1 says that the objective is just met.
Seeds beside those of the fit judge it. ``--write`` puts the weights and their error into the policy's README.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from millrace.enginemodel.coefficients import load_step_time
from millrace.policies.stages.instance import linear_instance
from numpy.typing import NDArray
from scipy.optimize import nnls
from scipy.stats import spearmanr

from bench.scenarios.scenarios import data_folder, scenario
from papers.flowkv.bench.flowkv_roles import LAYOUTS, placed
from papers.flowkv.bench.role_samples import LoadRecorder
from papers.flowkv.indicators import DECODE_TERMS, PREFILL_TERMS, Indicators, InstanceLimits
from simulator.scenarios.running import run_scenario
from simulator.scenarios.spec import ScenarioSpec

POLICY = Path(__file__).resolve().parents[1]
SPLITS = [label for label, (_, policy, brokers) in LAYOUTS.items() if policy == "fixed" and not brokers]
SPEEDS = (4.0, 8.0, 12.0)
TTFT_S, TPOT_S = 5.0, 0.025

#: A load is cut here, in objectives: how badly an overload ends depends on how long it lasts.
FELT_MAX = 4.0


class FeltRow(msgspec.Struct, frozen=True, kw_only=True):
    """One instance over a window; ``key`` names its run. Loads are shares of the objective, None where unknown."""

    key: str
    seed: int
    indicators: Indicators
    prefill: float | None
    decode: float | None


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of one score, and what they are worth on rows that were not fitted.

    Attributes:
        explained: Share of the variance.
        error: Mean absolute error, in objectives.
        rank: Spearman's correlation of score and load.
        sides: Share of the rows on the right side of 1.
    """

    weights: tuple[float, ...]
    fitted: int
    judged: int
    explained: float
    error: float
    rank: float
    sides: float


def main() -> int:
    """Makes the runs, fits, prints, and writes where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400, help="per run (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="parts of the trace; the last one judges")
    parser.add_argument("--rows", type=Path, help="keep windows here, JSON lines, and make no run twice")
    parser.add_argument("--write", action="store_true", help="write the table into the README.md of the policy")
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error("--seeds: at least 2, the last one judges")
    rows = _rows(arguments)
    fits = {"prefill": fit(rows, "prefill", arguments.seeds - 1), "decode": fit(rows, "decode", arguments.seeds - 1)}
    told = report(fits, arguments.requests, arguments.seeds)
    print(told)
    if arguments.write:
        _write(told)
    return 0


def _rows(arguments: argparse.Namespace) -> list[FeltRow]:
    path: Path | None = arguments.rows
    lines = path.read_bytes().splitlines() if path is not None and path.exists() else []
    known = [msgspec.json.decode(line, type=FeltRow) for line in lines]
    found = {row.key for row in known}
    for seed in range(arguments.seeds):
        for speed in SPEEDS:
            for label in SPLITS:
                key = f"{label}/{speed:g}/{seed}/{arguments.requests}"
                if key not in found:
                    made = _run(key, seed, _spec(label, speed, seed, arguments.requests))
                    known += made
                    if path is not None:
                        with path.open("ab") as file:
                            file.writelines(msgspec.json.encode(row) + b"\n" for row in made)
    return known


def _spec(label: str, speed: float, seed: int, requests: int) -> ScenarioSpec:
    settings = [f"seed={seed}", "roles.policy=fixed", "roles.parameters={}", f"workload.count={requests}"]
    settings += [f"workload.arrivals.speed={speed}", f"workload.lengths.skip={seed * requests}"]
    return placed(scenario("roles", settings), LAYOUTS[label][0])


def _run(key: str, seed: int, spec: ScenarioSpec) -> list[FeltRow]:
    recorder = LoadRecorder()
    run_scenario(spec, step_times=load_step_time, folders=(data_folder(),), checkers=(recorder,))
    group = spec.cluster.groups[0]
    engine = group.engine
    limits = InstanceLimits(max_sequences=engine.max_sequences, token_budget=engine.token_budget)
    model = linear_instance(
        load_step_time(group.step_time).cost(engine),
        kv_tokens=engine.blocks_total * engine.block_size,
        max_sequences=engine.max_sequences,
    )
    return [
        FeltRow(
            key=key,
            seed=seed,
            indicators=window.indicators,
            prefill=None if window.ttft_s is None else min(FELT_MAX, window.ttft_s / TTFT_S),
            decode=None if window.tpot_s is None else min(FELT_MAX, window.tpot_s / TPOT_S),
        )
        for window in recorder.windows(limits, model)
    ]


def fit(rows: Sequence[FeltRow], phase: str, judge: int) -> Fit:
    """Least squares without negative weights.

    Args:
        rows: Of all runs.
        phase: ``prefill`` or ``decode``.
        judge: Seed whose rows judge.

    Raises:
        ValueError: there are no rows to fit, or none to judge.
    """
    terms = PREFILL_TERMS if phase == "prefill" else DECODE_TERMS
    used = [row for row in rows if getattr(row, phase) is not None]
    matrix = np.array([[getattr(row.indicators, term) for term in terms] for row in used], np.float64)
    loads = np.array([getattr(row, phase) for row in used], np.float64)
    judges = np.array([row.seed == judge for row in used], np.bool_)
    if not judges.any() or judges.all():
        raise ValueError(f"{phase}: {len(used)} rows, {int(judges.sum())} of them to judge")
    weights, _ = nnls(matrix[~judges], loads[~judges])
    return _judged(weights, matrix[judges], loads[judges], fitted=int((~judges).sum()))


def _judged(
    weights: NDArray[np.float64], matrix: NDArray[np.float64], loads: NDArray[np.float64], *, fitted: int
) -> Fit:
    scores = matrix @ weights
    spread = float(((loads - loads.mean()) ** 2).sum())
    return Fit(
        weights=tuple(round(float(weight), 3) for weight in weights),
        fitted=fitted,
        judged=len(loads),
        explained=1 - float(((loads - scores) ** 2).sum()) / spread if spread > 0 else 0.0,
        error=float(np.abs(loads - scores).mean()),
        rank=float(spearmanr(scores, loads).statistic),
        sides=float(((scores > 1) == (loads > 1)).mean()),
    )


def report(fits: dict[str, Fit], requests: int, seeds: int) -> str:
    """The table of the README."""
    heads = [
        "",
        "L_r",
        "L_w",
        "L_sw",
        "L_se",
        "T_b",
        "KV_u",
        "G_u",
        "MB_u",
        "rows",
        "R²",
        "error",
        "rank",
        "right side of 1",
    ]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for phase, found in fits.items():
        cells = [phase, *(f"{weight:g}" for weight in found.weights), f"{found.fitted} + {found.judged}"]
        cells += [f"{found.explained:.2f}", f"{found.error:.2f}", f"{found.rank:.2f}", f"{found.sides:.0%}"]
        lines.append("| " + " | ".join(cells) + " |")
    runs = len(SPLITS) * len(SPEEDS)
    foot = (
        f"{runs} runs of {requests} requests for each of {seeds} parts of the trace; the last part judges. `error` is "
        "the mean absolute one, in objectives; `rank` Spearman's correlation."
    )
    return "\n".join([*lines, "", foot])


def _write(told: str) -> None:
    """Puts the table between the marks of the policy's README."""
    page = POLICY / "README.md"
    before, _, rest = page.read_text().partition("<!-- weights -->\n")
    _, _, after = rest.partition("<!-- /weights -->\n")
    page.write_text(f"{before}<!-- weights -->\n{told}\n<!-- /weights -->\n{after}")
