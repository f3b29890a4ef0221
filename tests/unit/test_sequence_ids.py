"""Sequence ids are made and taken apart in one place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace.contracts.sequences import SequenceId, request_id_of


@given(request=st.text(min_size=1), index=st.integers(min_value=0))
def test_what_is_written_is_read_again(request: str, index: int):
    written = str(SequenceId(request, index))
    assert SequenceId.parse(written) == SequenceId(request, index)
    assert request_id_of(written) == request


@pytest.mark.parametrize("text", ["", "r", "r.", ".0", "r.x", "r.-1", "r.²"])
def test_other_text_is_refused(text: str):
    with pytest.raises(ValueError, match="not a sequence id"):
        SequenceId.parse(text)


def test_a_request_that_is_no_sequence_stays_what_it_is():
    assert request_id_of("r") == "r"
