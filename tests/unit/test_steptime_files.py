"""Files of step-time coefficients: those that ship load, and wrong ones are refused with file and key."""

import pytest
from millrace.contracts.status import BatchComposition
from millrace.enginemodel.coefficients import coefficient_names, decode, load_coefficients, load_step_time


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
    ("name", "words"),
    [("abacus", "a30-llama-2-7b"), ("nowhere/abacus.toml", r"nowhere/abacus\.toml: cannot be read")],
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
