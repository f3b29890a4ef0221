"""Output of a modelled engine, and the duration of its steps."""

import statistics

import pytest
from millrace.contracts.status import BatchComposition
from millrace.enginemodel.coefficients import coefficient_names, load_coefficients
from millrace.enginemodel.stream import modelled_logprobs
from millrace.enginemodel.tokens import (
    OutputLengths,
    Vocabulary,
    kv_digest,
    next_token,
    seed_salt,
    stream_key,
)

from tests.testbed.modelled_tokens import tokens_after

TABLE = Vocabulary().table()


def test_each_token_follows_from_all_before_it_and_from_the_seed() -> None:
    said = tokens_after([1, 2, 3], 200, table=TABLE)
    assert said == tokens_after([1, 2, 3], 200, table=TABLE)
    assert said[50:] == tokens_after([1, 2, 3, *said[:50]], 150, table=TABLE)
    others = [
        tokens_after([1, 2, 3], 200, salt=seed_salt(0), table=TABLE),
        tokens_after([1, 2, 3], 200, salt=seed_salt(-1), table=TABLE),
        tokens_after([1, 3, 2], 200, table=TABLE),
    ]
    for other in others:
        assert sum(mine == theirs for mine, theirs in zip(said, other, strict=True)) < 40
    assert next_token(kv_digest([1]), 0, TABLE) in TABLE


def test_natural_lengths_have_the_mean_and_spread_asked_for() -> None:
    lengths = [OutputLengths(mean=200, sigma=0.8).length(stream_key([index], None)) for index in range(4000)]
    assert statistics.fmean(lengths) == pytest.approx(200, rel=0.06)
    assert statistics.median(lengths) == pytest.approx(200 * 2.718281828 ** (-(0.8**2) / 2), rel=0.06)
    assert min(lengths) >= 1
    assert {OutputLengths(mean=7, sigma=0).length(bytes([index])) for index in range(9)} == {7}
    assert OutputLengths(mean=500, sigma=0, length_max=40).length(b"key") == 40


def test_log_probabilities_fall_and_sum_to_less_than_one() -> None:
    for count in (0, 1, 5, 20):
        entry = modelled_logprobs(b"key", 7, 101, sorted(set(TABLE)), count)
        probabilities = [2.718281828**value for value in entry.logprobs[1:]]
        assert entry.token_ids[:2] == [101, 101][: 1 + min(count, 1)]
        assert len(entry.token_ids) == len(entry.logprobs) == count + 1
        assert len(set(entry.token_ids)) == max(count, 1)
        assert probabilities == sorted(probabilities, reverse=True)
        assert sum(probabilities) < 1


@pytest.mark.parametrize("name", coefficient_names())
def test_each_set_of_coefficients_says_where_it_is_from_and_grows_with_work(name: str) -> None:
    model = load_coefficients(name)
    assert all([model.provenance.model, model.provenance.hardware, model.provenance.source])
    assert "%" in model.provenance.error or "no measurement" in model.provenance.error
    one = model.duration_ns(BatchComposition(decodes=1, context_tokens=100))
    many = model.duration_ns(BatchComposition(decodes=64, context_tokens=6400))
    prefill = model.duration_ns(
        BatchComposition(prefills=1, prefill_tokens=2048, context_tokens=2048, prefill_work=2e6)
    )
    assert 0 < one < many < prefill
