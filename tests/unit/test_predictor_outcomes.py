"""Delay beyond forecasts: it is learnt from outcomes, and cancels out of what is learnt next."""

from typing import Any

import pytest
from millrace.contracts.observers import RequestFinished
from millrace.contracts.predictor import Forecast

from services.predictor.config import PredictorConfig
from services.predictor.outcomes import PAUSE_NS_MAX, Correction, OutcomeStatistics
from tests.unit.predictor_rig import MS, START_NS, Predictor, outcome, record, snapshot

TOLD = Forecast(ttft_ns=20 * MS, e2e_ns=1_010 * MS, tpot_mean_ns=10 * MS)


def corrected(by: Correction) -> Forecast:
    times = by.of(TOLD.ttft_ns, TOLD.e2e_ns, TOLD.tpot_mean_ns, TOLD.tpot_worst_ns)
    return Forecast(**dict(zip(Forecast.__struct_fields__, times, strict=False)))


def statistics(**config: Any) -> OutcomeStatistics:
    return OutcomeStatistics(PredictorConfig(**config))


def ended(told: Forecast, at_ns: int, **changes: Any) -> RequestFinished:
    """A request of 100 tokens that was predicted so, and had its first token 5 ms later and each other 20 % later."""
    fields: dict[str, Any] = {
        "arrival_ns": at_ns - 3 * MS,
        "placed_ns": at_ns,
        "ttft_ns": 28 * MS,
        "e2e_ns": 28 * MS + 99 * 12 * MS,
        "output_tokens": [100],
        "predicted_output_tokens": 100.0,
        "predicted_ttft_ns": told.ttft_ns,
        "predicted_e2e_ns": told.e2e_ns,
    }
    return outcome("r", **fields | changes)


def learnt(seen: OutcomeStatistics, count: int, **changes: Any) -> Forecast:
    """Return the correction of TOLD after so many outcomes, each predicted with what was known then."""
    at_ns = START_NS
    for _ in range(count):
        at_ns += 10 * MS
        seen.observe_times(ended(corrected(seen.correction), at_ns, **changes), at_ns + MS)
    return corrected(seen.correction)


def test_a_pause_and_a_factor_are_found_and_stay_where_they_are() -> None:
    seen = statistics()
    for _ in range(3):
        told = learnt(seen, 400)
        assert told.ttft_ns == pytest.approx(25 * MS, rel=0.05)
        assert told.e2e_ns - told.ttft_ns == pytest.approx(1.2 * 990 * MS, rel=0.04)


def test_outcomes_of_predictions_made_before_a_correction_do_not_correct_twice() -> None:
    seen = statistics()
    for number in range(1, 600):  # each was placed long before it ended: none knew of the correction
        seen.observe_times(ended(TOLD, START_NS), START_NS + number * MS)
    assert seen.correction.factor == pytest.approx(1.2, rel=0.04)


def test_an_output_of_another_length_than_predicted_says_the_same_of_its_tokens() -> None:
    told = learnt(statistics(), 400, output_tokens=[30], e2e_ns=28 * MS + 29 * 12 * MS)
    assert told.e2e_ns - told.ttft_ns == pytest.approx(1.2 * 990 * MS, rel=0.04)


def test_one_stall_moves_it_little() -> None:
    seen = statistics()
    learnt(seen, 300)
    before = seen.correction
    seen.observe_times(ended(corrected(before), START_NS + 1, ttft_ns=60_000 * MS, e2e_ns=600_000 * MS), 2 * START_NS)
    assert seen.correction.factor == pytest.approx(before.factor, rel=0.03)
    assert seen.correction.pause_ns - before.pause_ns < 0.02 * PAUSE_NS_MAX


@pytest.mark.parametrize(
    "changes",
    [
        {"predicted_ttft_ns": None},
        {"predicted_e2e_ns": None},
        {"ttft_ns": None},
        {"ttft_ns": 2 * MS},
        {"output_tokens": [100, 100]},
    ],
)
def test_what_cannot_be_compared_says_nothing(changes: dict[str, Any]) -> None:
    assert learnt(statistics(), 100, **changes) == TOLD


def test_a_correction_keeps_the_parts_of_a_prediction_together() -> None:
    told = corrected(Correction(0, -30 * MS, 1.5))
    assert told.ttft_ns == 1
    assert told.e2e_ns == 1 + 1_485 * MS
    assert told.tpot_mean_ns == 15 * MS


def test_a_predictor_answers_with_what_it_learnt_of_that_model() -> None:
    predictor = Predictor()
    predictor.register(record())
    predictor.register(record("w1", model="other"), "w1")
    predictor.send(snapshot())
    predictor.send(snapshot("w1", model="other"))
    first = predictor.ask()
    for _ in range(300):
        predictor.now_ns += 10 * MS
        predictor.send(snapshot(at_ns=START_NS))
        predictor.send(ended(TOLD, START_NS))
    assert predictor.ask().e2e_ns > 1.15 * first.e2e_ns
    assert predictor.actor.snapshot()["instances"]["w0"]["scale"] == 1.0
