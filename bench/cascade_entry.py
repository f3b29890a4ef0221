"""Cost of a cascade that chooses tiers from the prompt over the plain cascade, at equal quality; recorded answers.

nano, micro and mini with confidence judges. Judges, tree models, thresholds and the value of a right answer are fitted
on half of the prompts, the other half is served. Aim: at least 1.3 times cheaper than the plain cascade, held out.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from millrace.cascade.entry import choose_tiers, fit_entry
from millrace.cascade.sample import Booleans, Floats, Integers
from millrace.contracts.tagger import TagRequest
from millrace.judging.calibration import calibration_error
from millrace.judging.confidence import fit_confidence
from millrace.lengths.features import extract
from millrace.lengths.history import LengthHistory
from millrace.lengths.prompttext import read_prompt

from bench.judged.answers import MODELS, recorded, token_costs

#: Share of mini's quality that must be kept on the half that is fitted on.
TARGETS = (1.0, 0.98, 0.95)
THRESHOLDS = (0.0, 10.0, 25.0, 40.0, 55.0, 70.0, 80.0, 90.0, 97.0, 101.0)
#: Values of a right answer, in costs of a mean answer of mini.
VALUES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 1000.0)
FOLDS = 5
TOKENS_MAX = 512


class Half(NamedTuple):
    """Prompts with what every model did.

    Attributes:
        scores, right: (N, 3); scores of the judges.
        costs: (N, 3), ms of engine time.
        chances: (N, 3), estimates of P(right | prompt).
    """

    scores: Floats
    right: Booleans
    costs: Floats
    chances: Floats


class Served(NamedTuple):
    """Mean quality (%) and cost (ms) of a request."""

    quality: float
    cost: float


Way = Callable[[Half], Served]


def main() -> int:
    """Print a row per target and way of serving."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    splits = [_split(seed) for seed in range(options.seeds)]
    errors = [calibration_error(half.chances[:, i], half.right[:, i]) for _, half in splits for i in range(3)]
    print(f"calibration error of P(right | prompt): {np.mean(errors):.3f} ({min(errors):.3f} to {max(errors):.3f})")
    print("cost: ms of engine time per request; the plain cascade's cost over theirs at the quality they reached")
    print(f"{'target':>7}  {'way':<22}{'quality':>24}{'cost ms':>9}{'plain over it':>24}")
    for target in TARGETS:
        rows: dict[str, list[tuple[Served, float]]] = {}
        for fitted, held_out in splits:
            wanted = target * 100 * float(fitted.right[:, -1].mean())
            for name, way in _ways(fitted, wanted).items():
                served = way(held_out)
                rows.setdefault(name, []).append((served, _plain_at(held_out, served.quality) / served.cost))
        for name, found in rows.items():
            quality = _range([served.quality for served, _ in found])
            cost = float(np.mean([served.cost for served, _ in found]))
            print(f"{target:>7.0%}  {name:<22}{quality:>24}{cost:>9.1f}{_range([ratio for _, ratio in found]):>24}")
    return 0


def _ways(fitted: Half, wanted: float) -> dict[str, Way]:
    """Each way of serving with what is cheapest on the fitted half among what keeps the quality there."""
    whole = (0, len(MODELS) - 1)
    judged = list(itertools.product(THRESHOLDS, THRESHOLDS))
    plain = _cheapest([_way(None, pair, whole) for pair in judged], fitted, wanted)
    mean = float(fitted.costs[:, -1].mean())
    values = [value * mean for value in VALUES]
    costs = fitted.costs.mean(axis=0)
    both = [_way((value, costs), (same, same), whole) for value in values for same in THRESHOLDS]
    router = [_way((value, costs), (0.0, 0.0), whole) for value in values]
    return {
        "mini alone": _way(None, (0.0, 0.0), (2, 2)),
        "plain cascade": plain,
        "router, no judge": _cheapest(router, fitted, wanted),
        "entry tier and judge": _cheapest(both, fitted, wanted),
    }


def _way(choice: tuple[float, Floats] | None, thresholds: Sequence[float], fixed: tuple[int, int]) -> Way:
    def serve(half: Half) -> Served:
        count = len(half.right)
        if choice is None:
            first, last = (np.full(count, tier, dtype=np.int64) for tier in fixed)
        else:
            first, last = choose_tiers(half.chances, choice[1], value=choice[0])
        return _serve(half, thresholds, first, last)

    return serve


def _serve(half: Half, thresholds: Sequence[float], first: Integers, last: Integers) -> Served:
    count, tiers = half.right.shape
    open_, cost, right = np.zeros(count, dtype=bool), np.zeros(count), np.zeros(count, dtype=bool)
    for tier in range(tiers):
        open_ |= first == tier
        cost += np.where(open_, half.costs[:, tier], 0.0)
        accepts = half.scores[:, tier] >= (thresholds[tier] if tier < tiers - 1 else 0.0)
        ends = open_ & (accepts | (last == tier))
        right |= ends & half.right[:, tier]
        open_ &= ~ends
    return Served(100 * float(right.mean()), float(cost.mean()))


def _cheapest(ways: Sequence[Way], half: Half, wanted: float) -> Way:
    served = [(way, way(half)) for way in ways]
    keeping = [(way, each) for way, each in served if each.quality >= wanted]
    if not keeping:
        return max(served, key=lambda pair: pair[1].quality)[0]
    return min(keeping, key=lambda pair: pair[1].cost)[0]


def _plain_at(half: Half, quality: float) -> float:
    """Least cost of a plain cascade of at least this quality, thresholds picked on the very half it is judged by.

    That favours the plain cascade. Where none reaches the quality, the cost of the best one.
    """
    whole = (0, len(MODELS) - 1)
    served = [_way(None, pair, whole)(half) for pair in itertools.product(THRESHOLDS, THRESHOLDS)]
    reaching = [each.cost for each in served if each.quality >= quality]
    return min(reaching) if reaching else max(served, key=lambda each: (each.quality, -each.cost)).cost


def _split(seed: int) -> tuple[Half, Half]:
    """The fitted half, with estimates of folds that did not see the prompt, and the held-out half."""
    answers = recorded()
    order = np.random.default_rng(seed).permutation(len(answers.prompts))
    fitted, held_out = np.array_split(order, 2)
    judges = [
        fit_confidence(model, [answers.logprobs[index][each] for each in fitted], answers.right[fitted, index])
        for index, model in enumerate(MODELS)
    ]
    rows, right = features(), answers.right
    chances = np.zeros((len(fitted), len(MODELS)))
    for fold in range(FOLDS):
        inside = np.arange(len(fitted)) % FOLDS == fold
        model = fit_entry(rows[fitted[~inside]], right[fitted[~inside]], MODELS)
        chances[inside] = model.probabilities_many(rows[fitted[inside]])
    whole = fit_entry(rows[fitted], right[fitted], MODELS)

    def half(indices: Integers, estimates: Floats) -> Half:
        scores = [
            [judge.score(answers.logprobs[tier][each]) or 0.0 for tier, judge in enumerate(judges)] for each in indices
        ]
        costs = answers.output_tokens[indices] * token_costs()
        return Half(np.array(scores), right[indices], costs, estimates)

    return half(fitted, chances), half(held_out, whole.probabilities_many(rows[held_out]))


@cache
def features() -> Floats:
    """The tagger's features of all prompts, without history."""
    answers, history = recorded(), LengthHistory()
    return np.array(
        [
            extract(
                TagRequest(request="", model="", prompt_tokens=int(tokens), max_tokens=TOKENS_MAX, prompt=prompt),
                read_prompt(prompt),
                history,
            )
            for prompt, tokens in zip(answers.prompts, answers.prompt_tokens, strict=True)
        ]
    )


def _range(values: Sequence[float]) -> str:
    return f"{np.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"
