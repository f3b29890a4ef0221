"""Estimates of remaining lengths in scenarios, with a trained head's error."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from millrace.contracts.status import SequenceState, SequenceStatus

from papers.ares.head import HeadEstimates, Parameters


def status(name: str, generated: int, *, prompt: int = 100, expected: int | None = None) -> SequenceStatus:
    total = prompt + generated
    running = SequenceState.RUNNING
    return SequenceStatus(name, running, prompt, total, generated, 32_000, -(-total // 16), 0, expected)


def errors(generated: int, length: int, spec: Parameters, count: int = 2_000) -> np.ndarray:
    """Of the logarithm of one plus the rest, of many sequences."""
    head, at = HeadEstimates(spec, seed=1), generated - generated % spec.every
    told = [head.reported(status(f"r{n}.0", generated), length) for n in range(count)]
    assert {each.expected_at for each in told} == {at}
    return np.array([math.log1p(each.expected_output_tokens - at) - math.log1p(length - at) for each in told])


@pytest.mark.parametrize(("generated", "sigma"), [(10, 0.72), (40, 1.08), (3_000, 1.15)])
def test_the_error_of_estimates_is_as_wide_as_the_head_was_measured_to_have(generated, sigma):
    # Lengths in the middle of the bounds, so that few estimates are cut.
    found = errors(generated, generated + 600, msgspec.structs.replace(Parameters()))
    assert found.std() == pytest.approx(sigma, rel=0.06)
    assert abs(found.mean()) < 0.08


def test_errors_of_a_sequence_change_slowly_and_do_not_depend_on_where_it_is_asked():
    spec = Parameters()
    at_500, at_1000 = errors(500, 2_000, spec), errors(1_000, 2_500, spec)
    assert 0.5 < np.corrcoef(at_500, at_1000)[0, 1] < 0.9
    assert (errors(500, 2_000, spec) == at_500).all()


@pytest.mark.parametrize(
    "fields", [{"every": 0}, {"generated": (1, 8)}, {"sigmas": (1.0,)}, {"correlation": 1.5}, {"spread": -1.0}]
)
def test_a_head_that_cannot_be_is_refused(fields):
    with pytest.raises(ValueError, match=r"must|sigmas"):
        Parameters(**fields)
