"""``millrace train remaining``: from recordings to a head in force, and what it refuses."""

from pathlib import Path

import numpy as np
import pytest
from millrace.cli.__main__ import main
from millrace.lengths.head import HEAD_FILE, read_head
from millrace.lengths.states import SequenceStates, StatesHeader, state_writer


def _states(path: Path, *, count: int = 500, informative: bool = True) -> Path:
    """Sequences whose states tell their rest in one column."""
    rng = np.random.default_rng(1)
    writer = state_writer(path, StatesHeader(model="m", fingerprint="f", hidden_size=8))
    for number in range(count):
        length = int(rng.geometric(1 / 80))
        at = int(rng.integers(length))
        state = rng.normal(0, 1, 8)
        if informative:
            state[2] = np.log1p(length - at)
        writer.append([SequenceStates([number], length, True, 5_000, 0, [at], state.astype("<f2").tobytes())])
    return path


def test_states_become_a_head_beside_the_model_and_the_same_again_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = _states(tmp_path / "states", count=800)
    words = ["train", "remaining", "--from", str(states), "--model-path", str(tmp_path)]
    assert main(words) == 0
    assert "is better on" in capsys.readouterr().out
    head = read_head(tmp_path / HEAD_FILE, fingerprint="f")
    assert head.info.figures["head"]["error"] < head.info.figures["survival"]["error"]
    assert main(words) == 3
    assert main([*words, "--force"]) == 0


def test_states_that_tell_nothing_put_no_head_in_force(tmp_path: Path) -> None:
    states = _states(tmp_path / "states", informative=False)
    assert main(["train", "remaining", "--from", str(states), "--model-path", str(tmp_path)]) == 3
    assert not (tmp_path / HEAD_FILE).exists()
