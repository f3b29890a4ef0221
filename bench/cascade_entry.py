"""Cost of a cascade that chooses tiers from the prompt over the plain cascade, at equal quality; recorded answers.

nano, micro and mini with confidence judges. Judges, tree models, thresholds and the value of a right answer are fitted
on half of the prompts, the other half is served. Aim: at least 1.3 times cheaper than the plain cascade, held out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
from millrace.cascade.entry_training import (
    AnsweredPrompts,
    JudgedPrompts,
    ServedPrompts,
    answers_of,
    fitted,
    plain_at,
    ways_of,
)
from millrace.judging.calibration import calibration_error
from millrace.judging.files import read_recording

from bench.judged.answers import MODELS, PATH, token_costs

#: Share of mini's quality that must be kept on the half that is fitted on.
TARGETS = (1.0, 0.98, 0.95)


def main() -> int:
    """Print a row per target and way of serving."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    answers = answers_of(list(read_recording(PATH)), MODELS, token_costs().tolist())
    splits = [_split(answers, seed) for seed in range(options.seeds)]
    errors = [calibration_error(half.chances[:, i], half.right[:, i]) for _, half in splits for i in range(3)]
    print(f"calibration error of P(right | prompt): {np.mean(errors):.3f} ({min(errors):.3f} to {max(errors):.3f})")
    print("cost: ms of engine time per request; the plain cascade's cost over theirs at the quality they reached")
    print(f"{'target':>7}  {'way':<22}{'quality':>24}{'cost ms':>9}{'plain over it':>24}")
    for target in TARGETS:
        rows: dict[str, list[tuple[ServedPrompts, float]]] = {}
        for seen, held_out in splits:
            wanted = target * 100 * float(seen.right[:, -1].mean())
            for name, way in ways_of(seen, wanted).items():
                served = way.serve(held_out)
                rows.setdefault(name, []).append((served, plain_at(held_out, served.quality).cost / served.cost))
        for name, found in rows.items():
            quality = _range([served.quality for served, _ in found])
            cost = float(np.mean([served.cost for served, _ in found]))
            print(f"{target:>7.0%}  {name:<22}{quality:>24}{cost:>9.1f}{_range([ratio for _, ratio in found]):>24}")
    return 0


def _split(answers: AnsweredPrompts, seed: int) -> tuple[JudgedPrompts, JudgedPrompts]:
    """The fitted half, with estimates of folds that did not see the prompt, and the held-out half."""
    order = np.random.default_rng(seed).permutation(len(answers.right))
    seen, held_out = np.array_split(order, 2)
    judged = fitted(answers.part(seen), answers.part(held_out), MODELS)
    return judged[0], judged[1]


def _range(values: Sequence[float]) -> str:
    return f"{np.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"
