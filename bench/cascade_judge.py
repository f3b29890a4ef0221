"""Quality and cost of the confidence judge on held-out answers, by model.

Aims: calibration error of at most 0.05; the oracle (area 1, error 0) stands beside it. Truth: the tasks' check.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from millrace.judging.calibration import area_under_curve, calibration_error
from millrace.judging.confidence import ConfidenceModel, fit_confidence
from millrace.judging.evidence import ConfidenceFeature, feature_of

from bench.judged.answers import MODELS, recorded


def main() -> int:
    """Print a row per model and kind of judge."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    answers = recorded()
    print(f"{len(answers.prompts)} prompts, half to fit, half to judge, {options.seeds} splits: mean (least to most)")
    print(f"{'model':<16}{'judge':<26}{'area':>24}{'calibration error':>24}")
    for index, model in enumerate(MODELS):
        rows: dict[str, list[tuple[float, float]]] = {}
        for seed in range(options.seeds):
            for name, area, error in _split(index, seed):
                rows.setdefault(name, []).append((area, error))
        for name, found in rows.items():
            areas, errors = [area for area, _ in found], [error for _, error in found]
            print(f"{model:<16}{name:<26}{_range(areas):>24}{_range(errors):>24}")
    print(f"cost of a judgement: {_cost_us():.0f} us of CPU for an answer of mean length, no GPU, no round trip")
    return 0


def _split(index: int, seed: int) -> list[tuple[str, float, float]]:
    answers = recorded()
    order = np.random.default_rng(seed).permutation(len(answers.prompts))
    fitted, held_out = np.array_split(order, 2)
    right, logprobs = answers.right[:, index], answers.logprobs[index]
    model = fit_confidence("m", [logprobs[each] for each in fitted], right[fitted])
    truth = right[held_out]
    scores = np.array([(model.score(logprobs[each]) or 0.0) / 100 for each in held_out])
    mean = [feature_of(ConfidenceFeature.MEAN, logprobs[each]) for each in held_out]
    raw = np.exp(np.array(mean, dtype=np.float64))
    return [
        (f"confidence ({model.feature})", area_under_curve(scores, truth), calibration_error(scores, truth)),
        ("mean probability, raw", area_under_curve(raw, truth), calibration_error(raw, truth)),
        ("oracle", area_under_curve(truth.astype(float), truth), calibration_error(truth.astype(float), truth)),
    ]


def _range(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def _cost_us() -> float:
    answers = recorded()
    model: ConfidenceModel = fit_confidence("m", answers.logprobs[0], answers.right[:, 0])
    began = time.perf_counter()
    for logprobs in answers.logprobs[0]:
        model.score(logprobs)
    return (time.perf_counter() - began) / len(answers.prompts) * 1e6
