"""The linear step-time model, what it costs and refuses, and files of its coefficients."""

import pytest
from millrace.contracts.status import BatchComposition
from millrace.enginemodel.coefficients import coefficient_names, decode, load_coefficients, load_step_time
from millrace.enginemodel.step_time_models import LinearStepTime

BENT = LinearStepTime(fixed=1000, per_prefill_token=1, bends=((10, 2.0), (20, 3.0)))
TAIL = LinearStepTime(fixed=1000, per_context_token=1, per_tail_token=3, tail_decodes=4)
MIXED = LinearStepTime(fixed=1000, per_mixed_decode=7, per_mixed_context_token=2, per_mixed_work=3)
PROMPTED = LinearStepTime(fixed=1000, per_prefill_token=1, per_prefill_work=2, per_prompted_step=70)
SUM = LinearStepTime(fixed=1000, per_decode=10, per_prefill_token=5, per_context_token=0.5, per_prefill_work=0.25)


def decodes(count: int, context: int, longest: int = 0) -> BatchComposition:
    return BatchComposition(decodes=count, context_tokens=context, longest_context=longest)


def prompt(tokens: int) -> BatchComposition:
    return BatchComposition(prefills=1, prefill_tokens=tokens, context_tokens=tokens)


def mixed(count: int, tokens: int, **fields: float) -> BatchComposition:
    return BatchComposition(**{"decodes": count, "prefills": 1, "prefill_tokens": tokens, **fields})


BESIDE = mixed(4, 10, context_tokens=450, prefill_context_tokens=50, prefill_work=50.0)


@pytest.mark.parametrize(
    ("model", "batch", "ns"),
    [
        (SUM, mixed(3, 20, context_tokens=100, prefill_work=400.0), 1000 + 30 + 100 + 50 + 100),
        (BENT, prompt(10), 1000 + 10),
        (BENT, prompt(15), 1000 + 15 + 5 * 2),
        (BENT, prompt(30), 1000 + 30 + 20 * 2 + 10 * 3),
        (BENT, mixed(9, 3), 1000 + 3 + 2 * 2),  # decodes count towards a bend as prompt tokens do
        (TAIL, decodes(4, 400, 100), 1000 + 400),
        (TAIL, decodes(4, 400, 370), 1000 + 400 + 3 * 270),  # one is longer than the mean
        (TAIL, decodes(3, 400, 370), 1000 + 400),  # in a batch that is split
        (TAIL, decodes(4, 400), 1000 + 400),  # the longest is not known
        (MIXED, BESIDE, 1000 + 4 * 7 + 400 * 2 + 4 * 10 * 3),
        (MIXED, decodes(4, 400), 1000),
        (MIXED, prompt(10), 1000),
        (PROMPTED, prompt(5), 1000 + 70 + 5),
        (PROMPTED, mixed(3, 8, prefills=2, prefill_work=16.0), 1000 + 70 + 8 + 2 * 16),  # once for any prompts
        (PROMPTED, decodes(3, 40), 1000),
    ],
)
def test_a_step_costs(model: LinearStepTime, batch: BatchComposition, ns: int) -> None:
    assert model.duration_ns(batch) == ns


def test_only_the_context_of_decodes_makes_a_mean() -> None:
    batch = mixed(2, 9, context_tokens=1100, prefill_context_tokens=900, longest_context=150)
    assert LinearStepTime(fixed=1000, per_tail_token=3).duration_ns(batch) == 1000 + 3 * (150 - 100)


def test_a_machine_that_takes_twice_as_long_does_so_for_all_of_it() -> None:
    model = LinearStepTime(fixed=1000, per_prefill_token=3, per_prompted_step=70, bends=((4, 10.0), (8, -10.0)))
    assert model.times(2).duration_ns(prompt(30)) == 2 * model.duration_ns(prompt(30))


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


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"per_decode = 1.0", "fixed"),
        (b'fixed = "much"', "fixed"),
        (b"fixed = -5.0", "fixed"),
        (b"fixed = 1.0\nper_decode = nan", "per_decode"),
        (b"fixed = 1.0\nper_decod = 3.0", "per_decod"),
        (b"fixed = 1.0\nbends = [[64, -1.0]]", "bends"),
        (b"fixed = 1.0\n[provenance]\nmodel = 'a'", "hardware"),
        (b"fixed 1.0", "line 1"),
        (b"\xff\xfe\x00", "utf"),
    ],
)
def test_a_malformed_file_is_refused_with_file_and_key(content: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=r"mine\.toml") as raised:
        decode(content, origin="mine.toml")
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("name", "words"), [("abacus", "a30-llama-2-7b"), ("nowhere/abacus.toml", r"nowhere/abacus\.toml: cannot be read")]
)
def test_what_is_not_there_is_refused_by_its_name_or_with_the_names_that_are(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_step_time(name)


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
