"""Tiers chosen from the prompt."""

import msgspec
import numpy as np
import pytest
from millrace.cascade.entry import EntryModel, choose_tiers, fit_entry
from millrace.lengths.features import FEATURES

COSTS = np.array([1.0, 3.0, 10.0])
MODELS = ("small", "middle", "large")


def _tiers(*probabilities: float, value: float = 100.0) -> tuple[int, int]:
    first, last = choose_tiers(np.array([probabilities]), COSTS, value=value)
    return int(first[0]), int(last[0])


def test_a_smaller_model_that_is_better_ends_the_way():
    assert _tiers(0.3, 0.9, 0.5)[1] == 1


def test_the_choice_is_the_best_of_all_pairs():
    rng = np.random.default_rng(0)
    probabilities = np.sort(rng.random((50, 3)), axis=1)
    first, last = choose_tiers(probabilities, COSTS, value=30.0)
    for row, start, end in zip(probabilities, first, last, strict=True):
        gains = {
            (a, b): 30.0 * row[b] - COSTS[a] - sum((1 - row[t - 1]) * COSTS[t] for t in range(a + 1, b + 1))
            for a in range(3)
            for b in range(a, 3)
        }
        assert gains[int(start), int(end)] == pytest.approx(max(gains.values()))


def _prompts(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The small model is right below 0.4 of the first feature, the middle one below 0.7, the large one always."""
    rows = np.random.default_rng(seed).random((count, len(FEATURES)))
    return rows, np.column_stack([rows[:, 0] < 0.4, rows[:, 0] < 0.7, np.ones(count, dtype=bool)])


def test_what_decides_is_learnt_and_one_row_equals_many():
    rows, right = _prompts(600, 0)
    model = fit_entry(rows, right, MODELS)
    new, truth = _prompts(200, 1)
    estimated = model.probabilities_many(new)
    assert ((estimated > 0.5) == truth).mean() > 0.95
    assert np.allclose(model.probabilities(new[0]), estimated[0])


def test_too_little_to_learn_from_is_refused():
    rows, right = _prompts(50, 0)
    with pytest.raises(ValueError, match="50 judged prompts are too few"):
        fit_entry(rows, right, MODELS)
    rows, right = _prompts(200, 0)
    with pytest.raises(ValueError, match="shape"):
        fit_entry(rows, right, MODELS[:2])


def test_a_file_of_other_features_or_outputs_is_refused():
    rows, right = _prompts(200, 0)
    file = fit_entry(rows, right, MODELS).file
    with pytest.raises(ValueError, match="features"):
        EntryModel(msgspec.structs.replace(file, feature_version=0))
    with pytest.raises(ValueError, match="outputs"):
        EntryModel(msgspec.structs.replace(file, models=MODELS[:2]))
