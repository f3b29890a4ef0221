"""Remaining lengths: hidden states against a constant, the tagger and survival, on held-out requests of three models.

    python -m bench remaining --states FOLDER

Reads ``MODEL*.states`` from the folder, which ``python -m papers.ares.bench.record_states`` writes (real vLLM,
temperature 1); trains on three quarters of the prompts and judges by the rest, every token weighing the same. Long
outputs have 200 tokens and more. Intervals are bootstraps over requests, whose tokens come together. ``p90 corrected``:
as a worker tells it, which moves p90 by the held-out requests that ended before, one after the other as they were
recorded; how often a worker would refuse the head meanwhile is told as well. Aims: the head's mean error is at most 0.9
of survival's on long outputs, and its p90 covers 87 to 93 %.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from millrace.lengths.coverage import Coverage, P90Correction
from millrace.lengths.scoring import Numbers, interval
from numpy.typing import NDArray

from papers.ares.hidden_states.recorded import SequenceStates, read_states, states_header
from papers.ares.hidden_states.training import (
    StateMatrix,
    by_request,
    fit,
    matrix,
    part_of,
    predictions,
    survival_of,
)

MODELS = ("nano", "micro", "mini")
SEED = 7
LONG = 200


def of_requests(
    data: StateMatrix, predicted: dict[str, Numbers], chosen: NDArray[np.bool_]
) -> tuple[StateMatrix, dict[str, Numbers]]:
    """The samples of some requests."""
    rows = chosen[data.request]
    kept = {name: getattr(data, name)[rows] for name in data.__struct_fields__}
    kept["request"] = np.unique(kept["request"], return_inverse=True)[1]
    return StateMatrix(**kept), {name: said[rows] for name, said in predicted.items()}


def ratio(errors: Numbers, baseline: Numbers) -> tuple[float, float, float]:
    """Mean of ``errors`` over that of ``baseline``, with its 95 % interval, by bootstrap over requests."""
    rng = np.random.default_rng(SEED)
    drawn = rng.integers(0, len(errors), (1_000, len(errors)))
    low, high = np.quantile(errors[drawn].mean(axis=1) / baseline[drawn].mean(axis=1), (0.025, 0.975))
    return float(errors.mean() / baseline.mean()), float(low), float(high)


def corrected(held: StateMatrix, said: Numbers) -> tuple[Numbers, float]:
    """Estimates as a worker tells them, (samples, 3), and the share of requests at whose end it would refuse the head.

    A request is told with what those before it have taught; an estimate is judged at each doubling of its length.
    """
    coverage, correction, told, refused = Coverage(), P90Correction(), said.copy(), 0
    ends = np.flatnonzero(np.diff(held.request, append=-1)) + 1
    for first, end in zip([0, *ends[:-1]], ends, strict=True):
        for row in range(first, end):
            told[row, 2] = min(correction.moved(*map(round, said[row, 1:])), max(said[row, 2], held.left[row]))
        due = doublings(held.generated[first:end].tolist())
        length = int(held.generated[first] + held.rest[first])
        for row, until in zip(due, [*(int(held.generated[first + at]) for at in due[1:]), length], strict=True):
            tokens, rest = until - int(held.generated[first + row]), held.rest[first + row]
            coverage.judge(tokens, within=rest <= said[first + row, 2])
            correction.judge(tokens, within=rest <= told[first + row, 2])
        refused += bool(coverage.refusal)
    return told, refused / len(ends)


def doublings(generated: Sequence[int]) -> list[int]:
    """Indices of the first count and of each that has doubled since, as a worker watches them."""
    due: list[int] = []
    for index, count in enumerate(generated):
        if not due or count >= max(1, 2 * generated[due[-1]]):
            due.append(index)
    return due


def table(title: str, held: StateMatrix, predicted: dict[str, Numbers]) -> None:
    """Prints the figures of every predictor on these requests."""
    print(f"\n{title}")
    print(f"{'':<38}{'mean error, 95 % CI':>26}{'of survival, 95 % CI':>26}{'<=p90, %, 95 % CI':>24}")
    errors = {name: by_request(np.abs(said[:, 1] - held.rest), held) for name, said in predicted.items()}
    for name, said in predicted.items():
        low, high = interval(errors[name], seed=SEED)
        share, least, most = ratio(errors[name], errors["survival"])
        within = (held.rest <= said[:, 2]).astype(np.float64)
        covered = [100 * each for each in ratio(by_request(within, held), by_request(np.ones(len(held)), held))]
        print(f"{name:<38}{errors[name].mean():>9.1f} [{low:>6.1f}, {high:>6.1f}]{share:>11.2f} "
              f"[{least:.2f}, {most:.2f}]{covered[0]:>10.1f} [{covered[1]:>4.1f}, {covered[2]:>5.1f}]")  # fmt: skip


def judged(files: Sequence[Path], title: str) -> None:
    """Trains on one model's states and prints what came of it."""
    parts: dict[str, list[SequenceStates]] = {"held": [], "tuning": [], "trained": []}
    for one in read_states(files):
        parts[part_of(one.prompt)].append(one)
    seen, tuning, held = (matrix(parts[name]) for name in ("trained", "tuning", "held"))
    survival = survival_of(parts["trained"])
    head = fit(seen, tuning, survival=survival, header=states_header(files[0]))
    predicted = predictions(seen, held, survival=survival, head=head)
    predicted["head, p90 corrected"], refused = corrected(held, predicted["head"])
    lengths = np.array([one.length for one in parts["held"] if one.generated])
    table(f"{title}: trained on {len(parts['trained'])}, judged by {len(lengths)} requests, mean output "
          f"{lengths.mean():.0f} tokens", held, predicted)  # fmt: skip
    long, said = of_requests(held, predicted, lengths >= LONG)
    print(f"a worker would refuse the head at the end of {refused:.1%} of these requests")
    table(f"{title}, outputs of {LONG} tokens and more: {int((lengths >= LONG).sum())} requests", long, said)


def main() -> int:
    """Prints a table per model; returns 1 where no states are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=Path, required=True, help="folder of the recorded states")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, metavar="NAME")
    arguments = parser.parse_args()
    found = False
    for model in arguments.models:
        files = sorted(arguments.states.glob(f"*{model}*.states"))
        if files:
            judged(files, f"millrace-{model}")
            found = True
        else:
            print(f"millrace-{model}: no states in the folder")
    return 0 if found else 1
