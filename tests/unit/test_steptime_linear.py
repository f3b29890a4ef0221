"""The linear step-time model: what it costs, and what it refuses."""

import pytest
from millrace.contracts.status import BatchComposition
from millrace.enginemodel.step_time_models import LinearStepTime


def test_a_step_costs_more_per_token_beyond_each_bend() -> None:
    model = LinearStepTime(fixed=1000, per_prefill_token=1, bends=((10, 2.0), (20, 3.0)))

    assert _prompt(model, 10) == 1000 + 10
    assert _prompt(model, 15) == 1000 + 15 + 5 * 2
    assert _prompt(model, 30) == 1000 + 30 + 20 * 2 + 10 * 3


def test_decodes_count_towards_a_bend_as_prompt_tokens_do() -> None:
    model = LinearStepTime(fixed=1000, bends=((4, 7.0),))

    mixed = BatchComposition(decodes=3, prefills=1, prefill_tokens=5, context_tokens=100)

    assert model.duration_ns(mixed) == 1000 + 4 * 7


def test_a_longest_sequence_costs_what_it_is_longer_than_the_mean_in_batches_that_are_not_split() -> None:
    model = LinearStepTime(fixed=1000, per_context_token=1, per_tail_token=3, tail_decodes=4)

    even = BatchComposition(decodes=4, context_tokens=400, longest_context=100)
    skewed = BatchComposition(decodes=4, context_tokens=400, longest_context=370)
    split = BatchComposition(decodes=3, context_tokens=400, longest_context=370)
    unknown = BatchComposition(decodes=4, context_tokens=400)

    assert model.duration_ns(even) == 1000 + 400
    assert model.duration_ns(skewed) == 1000 + 400 + 3 * 270
    assert model.duration_ns(split) == 1000 + 400
    assert model.duration_ns(unknown) == 1000 + 400


def test_only_the_context_of_decodes_makes_a_mean() -> None:
    model = LinearStepTime(fixed=1000, per_tail_token=3)
    mixed = BatchComposition(
        decodes=2, prefills=1, prefill_tokens=9, context_tokens=1100, prefill_context_tokens=900, longest_context=150
    )

    assert model.duration_ns(mixed) == 1000 + 3 * (150 - 100)


def test_decodes_beside_prompt_tokens_cost_more_than_each_alone() -> None:
    model = LinearStepTime(fixed=1000, per_mixed_decode=7, per_mixed_context_token=2, per_mixed_work=3)
    mixed = BatchComposition(
        decodes=4, prefills=1, prefill_tokens=10, context_tokens=450, prefill_context_tokens=50, prefill_work=50.0
    )

    assert model.duration_ns(mixed) == 1000 + 4 * 7 + 400 * 2 + 4 * 10 * 3
    assert model.duration_ns(BatchComposition(decodes=4, context_tokens=400)) == 1000
    assert _prompt(model, 10) == 1000


def test_a_step_with_any_prompt_costs_once_more_however_many_prompts_there_are() -> None:
    model = LinearStepTime(fixed=1000, per_prefill_token=1, per_prefill_work=2, per_prompted_step=70)

    two = BatchComposition(
        decodes=3, prefills=2, prefill_tokens=8, prefill_work=16.0, context_tokens=40, prefill_context_tokens=8
    )

    assert _prompt(model, 5) == 1000 + 70 + 5
    assert model.duration_ns(two) == 1000 + 70 + 8 + 2 * 16
    assert model.duration_ns(BatchComposition(decodes=3, context_tokens=40)) == 1000


def test_a_machine_that_takes_twice_as_long_does_so_for_all_of_it() -> None:
    model = LinearStepTime(fixed=1000, per_prefill_token=3, per_prompted_step=70, bends=((4, 10.0), (8, -10.0)))

    assert _prompt(model.times(2), 30) == 2 * _prompt(model, 30)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"fixed": -1.0}, "fixed"),
        ({"fixed": 1.0, "per_decode": float("nan")}, "per_decode"),
        ({"fixed": 1.0, "per_prompted_step": -1.0}, "per_prompted_step"),
        ({"fixed": 1.0, "per_context_token": float("inf")}, "per_context_token"),
        ({"fixed": 1.0, "per_tail_token": -1.0}, "per_tail_token"),
        ({"fixed": 1.0, "per_mixed_work": -1.0}, "per_mixed_work"),
        ({"fixed": 1.0, "tail_decodes": -1}, "tail_decodes"),
        ({"fixed": 1.0, "bends": ((8, -1.0),)}, "bends"),
        ({"fixed": 1.0, "bends": ((8, 2.0), (16, -3.0))}, "bends"),
        ({"fixed": 1.0, "bends": ((8, 1.0), (8, 1.0))}, "bends"),
    ],
)
def test_costs_that_no_step_can_have_are_refused_by_name(fields: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        LinearStepTime(**fields)  # type: ignore[arg-type]


def _prompt(model: LinearStepTime, tokens: int) -> int:
    return model.duration_ns(BatchComposition(prefills=1, prefill_tokens=tokens, context_tokens=tokens))
