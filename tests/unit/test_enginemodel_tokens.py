"""Output of a modelled engine, and the duration of its steps."""

import statistics

import pytest
from millrace.contracts.status import BatchComposition
from millrace.enginemodel.coefficients import coefficient_names, load_coefficients
from millrace.enginemodel.tokens import (
    OutputLengths,
    stream_key,
)


def test_natural_lengths_have_the_mean_and_spread_asked_for() -> None:
    lengths = [OutputLengths(mean=200, sigma=0.8).length(stream_key([index], None)) for index in range(4000)]
    assert statistics.fmean(lengths) == pytest.approx(200, rel=0.06)
    assert statistics.median(lengths) == pytest.approx(200 * 2.718281828 ** (-(0.8**2) / 2), rel=0.06)
    assert min(lengths) >= 1
    assert {OutputLengths(mean=7, sigma=0).length(bytes([index])) for index in range(9)} == {7}
    assert OutputLengths(mean=500, sigma=0, length_max=40).length(b"key") == 40


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
