"""The cost of unequal lengths in one batch, as a share of the attention of equal ones."""

import pytest
from millrace.contracts.status import BatchComposition
from millrace.enginemodel.step_time_models import LinearStepTime

from papers.cascadeinfer.unequal import load_unequal, unequal


def test_a_penalty_without_a_dimension_is_a_share_of_the_attention_of_equal_lengths() -> None:
    plain = LinearStepTime(fixed=1000, per_context_token=10)
    model = unequal(plain, 0.2, per_head=16.5)
    batch = BatchComposition(decodes=64, context_tokens=64_000, longest_context=16_000)

    r = 16_000 * 16.5 / 64_000
    attention = 10 * 64_000 * (1 + 0.2 * r * (1 - 1_000 / 16_000))
    assert model.tail_decodes == 27
    assert model.duration_ns(batch) == pytest.approx(1000 + attention)
    assert unequal(plain, 0, per_head=16.5).duration_ns(batch) == 1000 + 640_000


def test_a_scenario_names_the_penalty_behind_its_set() -> None:
    plain, held_up = load_unequal("h200-llama-3-8b"), load_unequal("h200-llama-3-8b with kappa 0.2")
    batch = BatchComposition(decodes=64, context_tokens=64_000, longest_context=16_000)
    assert held_up.duration_ns(batch) > 1.1 * plain.duration_ns(batch)
