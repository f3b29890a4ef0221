"""Remaining lengths from outcomes alone: the estimator against one written token by token in plain Python."""

from itertools import pairwise

import numpy as np
import pytest
from millrace.lengths import survival
from millrace.lengths.survival import BINS, EDGES, EXACT, OUTCOMES_MIN, Rest, Survival, bin_of
from numpy.typing import ArrayLike, NDArray

LONGEST = 100


def alive_of(survival: Survival, generated: ArrayLike, ahead: ArrayLike) -> NDArray[np.float64]:
    """Probability that each sequence generates more than so many further tokens, shape (sequences, points)."""
    counts, points = np.asarray(generated, float), (EDGES - 1).astype(float)
    later = np.interp(counts[:, None] + np.asarray(ahead, float), points, survival.curve())
    return np.asarray(later / np.interp(counts, points, survival.curve())[:, None])


def _lives(seed: int, count: int = 400) -> list[tuple[int, int, bool]]:
    """(length, entered, ended) of sequences shorter than the bins of several tokens; some cut, some come later."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.geometric(1 / 25, count), LONGEST)
    entered = np.where(rng.random(count) < 0.3, rng.integers(0, 20, count), 0)
    ended = rng.random(count) < 0.8
    lives = zip(lengths.tolist(), entered.tolist(), ended.tolist(), strict=True)
    return [(length, came, end) for length, came, end in lives if came < length]


def _survival_by_hand(lives: list[tuple[int, int, bool]], *, half_life: float, prior: float) -> list[float]:
    """P(length > x) for x from 0 on: the product over tokens of one minus ended over at risk."""
    newest = len(lives)
    weights = [2.0 ** ((index + 1 - newest) / half_life) for index in range(newest)]
    curve = [1.0]
    for token in range(1, LONGEST + 20):
        at_risk, ended = prior, prior / (token + 1)
        for (length, came, end), weight in zip(lives, weights, strict=True):
            if came < token <= length:
                at_risk += weight
                ended += weight if end and length == token else 0.0
        curve.append(curve[-1] * (1.0 - ended / at_risk))
    return curve


def _rest_by_hand(curve: list[float], generated: int, share: float) -> int:
    level = (1.0 - share) * curve[generated]
    return next(x for x in range(generated + 1, len(curve)) if curve[x] <= level + 1e-12) - generated


def _learnt(lives: list[tuple[int, int, bool]], **options: float) -> Survival:
    known = Survival(**options)
    for length, came, end in lives:
        known.learn(length, entered=came, ended=end)
    known.curve()
    return known


def test_every_length_lies_in_its_bin_and_bins_are_narrow() -> None:
    lengths = [*range(1_000), *(1 << power for power in range(24)), 12_345, 131_071, 1 << 23]
    for length in lengths:
        low = bin_of(length)
        assert EDGES[low] <= length < EDGES[low + 1]
    assert all((after - before) / before <= 1 / 64 for before, after in pairwise(EDGES[EXACT:].tolist()))
    assert bin_of(1 << 40) == BINS - 1


@pytest.mark.parametrize("seed", range(5))
def test_survival_and_quantiles_equal_those_computed_token_by_token(seed: int) -> None:
    lives = _lives(seed)
    known = _learnt(lives, half_life=150.0, prior=1.0)
    curve = _survival_by_hand(lives, half_life=150.0, prior=1.0)
    generated = np.arange(0, 60, 7)
    ahead = np.array([1, 5, 30])
    alive = alive_of(known, generated, ahead)
    for row, count in enumerate(generated.tolist()):
        assert alive[row] == pytest.approx([curve[count + more] / curve[count] for more in ahead.tolist()])
    # Where little is left the answer lies in bins of several tokens: only what ends below EXACT is compared.
    said = known.quantiles(generated, (0.25, 0.5))
    expected = [[_rest_by_hand(curve, count, share) for share in (0.25, 0.5)] for count in generated.tolist()]
    assert said.tolist() == expected


def test_the_table_says_what_the_exact_query_says() -> None:
    rng = np.random.default_rng(3)
    known = _learnt([(int(length), 0, True) for length in rng.lognormal(6, 1.2, 2_000) + 1])
    for generated in (0, 1, 40, 127, 128, 500, 3_000, 9_999):
        p50, p90 = known.quantiles([generated], (0.5, 0.9))[0].tolist()
        told = known.rest(generated)
        assert told.p50 == pytest.approx(p50, rel=0.04, abs=1)
        assert told.p90 == pytest.approx(p90, rel=0.04, abs=1)


def test_what_outran_everything_seen_lasts_as_long_again() -> None:
    known = _learnt([(length, 0, True) for length in range(1, 51)])
    rest = known.rest(1_000)
    assert rest.p50 == pytest.approx(1_000, rel=0.05)
    assert rest.p90 == pytest.approx(9_000, rel=0.05)


def test_weights_that_grow_without_end_are_rescaled() -> None:
    known = _learnt([(20, 0, True), (40, 0, True)] * 5_000, half_life=20.0)
    assert alive_of(known, [0], [30])[0, 0] == pytest.approx(0.5, abs=0.05)
    assert known._weight <= survival._WEIGHT_MAX


def test_little_says_nothing_and_nonsense_teaches_nothing() -> None:
    known = Survival()
    for length, entered in ((0, 0), (-5, 0), (10, -1)):
        known.learn(length, entered=entered)
    known.learn(10, entered=10, ended=False)
    assert known.outcomes == 0
    for _ in range(OUTCOMES_MIN - 1):
        known.learn(10)
    assert known.rest(0) is None
    known.learn(10)
    assert known.rest(0) == Rest(10, 10)
