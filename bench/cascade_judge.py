"""Quality and cost of the confidence judge and of the trained LLM judge on held-out answers, by model.

Aims: calibration error of at most 0.05; the oracle (area 1, error 0) stands beside it. Truth: the tasks' check.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from millrace.enginemodel.coefficients import load_step_time
from millrace.judging.calibration import area_under_curve, calibration_error, fit_isotonic
from millrace.judging.confidence import ConfidenceModel, fit_confidence
from millrace.judging.evidence import ConfidenceFeature, feature_of
from numpy.typing import NDArray

from bench.judged.answers import BATCH, MODELS, STEP_TIMES, recorded, token_costs
from bench.judged.record_verdicts import JUDGE, PATH, read_verdicts


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
    if PATH.exists():
        _trained(options.seeds)
    return 0


def _trained(seeds: int) -> None:
    """The trained judge and confidence on the same answers, whose texts it has read."""
    rows = read_verdicts()
    print(f"\n{JUDGE.name}, {len(rows)} prompts, its curves from one half of the prompts")
    print(f"{'model':<16}{'judge':<26}{'area':>24}{'calibration error':>24}")
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for seed in range(seeds):
        order = np.random.default_rng(seed).permutation(len(rows))
        fitted, held_out = ([rows[each] for each in part] for part in np.array_split(order, 2))
        for key, figures in _by_model(fitted, held_out, seed):
            found.setdefault(key, []).append(figures)
    for (model, name), pairs in sorted(found.items(), key=lambda item: MODELS.index(item[0][0])):
        areas, errors = [area for area, _ in pairs], [error for _, error in pairs]
        print(f"{model:<16}{name:<26}{_range(areas):>24}{_range(errors):>24}")
    _cost_of_verdicts(rows)


def _by_model(
    fitted: list[dict[str, Any]], held_out: list[dict[str, Any]], seed: int
) -> Iterator[tuple[tuple[str, str], tuple[float, float]]]:
    everything = [told for row in fitted for told in row.values()]
    verdicts = fit_isotonic(_values(everything, "yes"), _values(everything, "right") > 0)
    for model in MODELS:
        known, judged = [row[model] for row in fitted], [row[model] for row in held_out]
        truth = _values(judged, "right") > 0
        confidence = fit_isotonic(_values(known, "logprob"), _values(known, "right") > 0)
        own = fit_isotonic(_values(known, "yes"), _values(known, "right") > 0)
        by_judge = own.at(_values(judged, "yes"))
        by_confidence = confidence.at(_values(judged, "logprob"))
        for name, scores in (
            ("llm, trained", by_judge),
            ("llm, one curve of all", verdicts.at(_values(judged, "yes"))),
            ("confidence (sum)", by_confidence),
            ("mean of both", (by_judge + by_confidence) / 2),
        ):
            yield (model, name), (area_under_curve(scores, truth), calibration_error(scores, truth))
        drawn = np.random.default_rng([seed, 1]).random(len(truth)) < by_judge
        yield (
            (model, "its scores, if all true"),
            (area_under_curve(by_judge, drawn), calibration_error(by_judge, drawn)),
        )


def _values(told: list[dict[str, Any]], field: str) -> NDArray[np.float64]:
    """One value per answer; a verdict that the judge did not give counts as undecided."""
    return np.array([0.5 if each[field] is None else each[field] for each in told], dtype=np.float64)


def _cost_of_verdicts(rows: list[dict[str, Any]]) -> None:
    """Engine time of a verdict beside that of the answer it is about, by the shipped CPU step times."""
    step = load_step_time(STEP_TIMES[1])
    for model, per_token in zip(MODELS, token_costs(), strict=True):
        read = float(np.mean([row[model]["judge_tokens"] for row in rows]))
        answer_ms = float(per_token * np.mean([row[model]["output_tokens"] for row in rows]))
        verdict_ms = (
            step.fixed / BATCH + step.per_prefill_token * read + step.per_prefill_work * read * read / 2
        ) / 1e6
        print(f"{model}: a verdict reads {read:.0f} tokens, {verdict_ms:.1f} ms; the answer took {answer_ms:.1f} ms")


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
