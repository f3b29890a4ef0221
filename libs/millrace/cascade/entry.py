"""Tiers of a request chosen from its prompt: where it enters the cascade, and how far it may go.

Two parts: trees that estimate P(right | prompt) of each model from the tagger's features, and a rule that turns the
estimates into a first and a last tier. Skipping a hopeless tier saves its attempt; not escalating to a model that would
fail as well saves the rest.

Source: the tagger's features (``lengths/features.py``); routing by expected cost and quality as in Dekoninck et al.
(arXiv 2410.10347), with nested correctness assumed: a larger model is right wherever a smaller one is.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from millrace.cascade.sample import Booleans, Floats, Integers
from millrace.contracts.tagger import TagRequest
from millrace.lengths.features import FEATURE_VERSION, extract
from millrace.lengths.history import LengthHistory
from millrace.lengths.prompttext import read_prompt
from millrace.lengths.trees import FlatTrees, Forest, flatten

#: Fewer judged prompts than this give no model.
PROMPTS_MIN = 100
ROUNDS = 60
LEAF_MIN = 10
#: Estimates stay this far from 0 and 1: a few hundred prompts cannot show more.
LEAST = 0.01

#: Output bound that features are computed with.
TOKENS_MAX = 512

_NO_HISTORY = LengthHistory()

_PARAMETERS: dict[str, Any] = {
    "objective": "binary",
    "verbosity": -1,
    "num_threads": 1,
    "deterministic": True,
    "seed": 7,
    "use_missing": False,
    "learning_rate": 0.08,
    "num_leaves": 12,
    "max_depth": 5,
    "feature_fraction": 0.6,
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
    "min_data_in_leaf": LEAF_MIN,
}


class EntryFile(msgspec.Struct, frozen=True, kw_only=True):
    """A fitted model as it is stored.

    Attributes:
        models: Names of their folders, smallest first: one output each.
        feature_version: Of the tagger's features.
        trees: Log-odds of a right answer.
        costs: Of a mean answer of each model, any unit; empty where they were not fitted.
        value: Of a right answer, in the same unit: what raises quality and cost together.
        fingerprints: Of the models' weights; empty for any.
    """

    models: tuple[str, ...]
    trees: FlatTrees
    costs: tuple[float, ...] = ()
    value: float = 0.0
    fingerprints: tuple[str, ...] = ()
    feature_version: int = FEATURE_VERSION


class EntryModel:
    """P(right | prompt) of each model of a cascade.

    Raises:
        ValueError: the file is of other features, or its outputs are not one per model.
    """

    def __init__(self, file: EntryFile) -> None:
        if file.feature_version != FEATURE_VERSION:
            raise ValueError(f"entry model of features {file.feature_version}, these are {FEATURE_VERSION}")
        if len(file.trees.outputs) != len(file.models):
            raise ValueError(f"entry model has {len(file.trees.outputs)} outputs for {len(file.models)} models")
        if file.costs and len(file.costs) != len(file.models):
            raise ValueError(f"entry model has {len(file.costs)} costs for {len(file.models)} models")
        self.file = file
        self._forest = Forest(file.trees)

    def probabilities(self, row: Floats) -> Floats:
        """(C,) of one row of features."""
        return _probabilities(self._forest.predict(row))

    def probabilities_many(self, rows: Floats) -> Floats:
        """(N, C) of (N, features)."""
        return _probabilities(self._forest.predict_many(rows))


def prompt_features(head: str, prompt_tokens: int) -> list[float]:
    """Row of features of a prompt, from its first characters as rendered, or without a template.

    Only the text and its length are known here: sampling parameters are those that answers were recorded with, and
    nothing is known of earlier requests.
    """
    request = TagRequest(request="", model="", prompt_tokens=prompt_tokens, max_tokens=TOKENS_MAX, prompt=head)
    return extract(request, read_prompt(head), _NO_HISTORY)


def _probabilities(odds: Floats) -> Floats:
    return np.clip(1.0 / (1.0 + np.exp(-odds)), LEAST, 1.0 - LEAST)


def fit_entry(rows: Floats, right: Booleans, models: tuple[str, ...]) -> EntryModel:
    """Trees for each model. Needs LightGBM; takes a second.

    Args:
        rows: (N, features) of the tagger.
        right: (N, C), whether each model's answer was right: all models must have answered all prompts, since what a
            cascade passes on is no fair sample of what it gets.

    Raises:
        ValueError: too few prompts, or shapes that do not match.
    """
    import lightgbm

    if len(rows) < PROMPTS_MIN:
        raise ValueError(f"{len(rows)} judged prompts are too few to choose tiers by, needs {PROMPTS_MIN}")
    if right.shape != (len(rows), len(models)):
        raise ValueError(f"right has shape {right.shape}, needs {(len(rows), len(models))}")
    boosters = [
        lightgbm.train(_PARAMETERS, lightgbm.Dataset(rows, right[:, index].astype(np.float64)), ROUNDS)
        for index in range(len(models))
    ]
    return EntryModel(EntryFile(models=models, trees=flatten([booster.dump_model() for booster in boosters])))


def choose_tiers(probabilities: Floats, costs: Floats, *, value: float) -> tuple[Integers, Integers]:
    """First and last tier of each request: the pair of greatest ``value · P(right) - expected cost``.

    Args:
        probabilities: (N, C), of each model alone.
        costs: (C,) or (N, C), of an attempt, in any unit.
        value: Of a right answer, in the same unit: what raises quality and cost together.

    Returns:
        Two arrays (N,); the first one is never above the last. Cheaper pairs win ties.
    """
    nested = np.maximum.accumulate(probabilities, axis=1)
    count, tiers = nested.shape
    each = np.broadcast_to(costs, nested.shape)
    best = np.full(count, -np.inf)
    first, last = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    for start in range(tiers):
        cost = np.zeros(count)
        for end in range(start, tiers):
            reached = 1.0 if end == start else 1.0 - nested[:, end - 1]
            cost = cost + reached * each[:, end]
            gain = value * nested[:, end] - cost
            better = gain > best
            best[better], first[better], last[better] = gain[better], start, end
    return first, last
