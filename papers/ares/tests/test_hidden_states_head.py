"""The head on hidden states: its arithmetic against plain Python, its file, recorded states, training and its guard."""

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from millrace.lengths.frames import FileUnreadable
from millrace.lengths.head import (
    FEATURES,
    HEAD_FILE,
    HeadInfo,
    HeadUnreadable,
    RemainingHead,
    read_head,
    survival_table,
    write_head,
)
from millrace.lengths.survival import Survival

import papers.ares.hidden_states.recorded as kept_states
from papers.ares.hidden_states.__main__ import main
from papers.ares.hidden_states.recorded import (
    STATES_MAX,
    SequenceStates,
    StateReservoir,
    StatesHeader,
    read_states,
    state_writer,
    states_header,
)
from papers.ares.hidden_states.training import (
    HOLDOUT_MIN,
    by_request,
    judge,
    matrix,
    part_of,
    train_head,
    weighted_score,
)

WIDTH = 16
HEADER = StatesHeader(model="m", fingerprint="f", hidden_size=WIDTH)
RNG = np.random.default_rng(2)


def survival() -> Survival:
    known = Survival()
    for length in np.random.default_rng(1).integers(1, 300, 1_000).tolist():
        known.learn(length)
    return known


def head(*, zero: bool = False, fingerprint: str = "f") -> RemainingHead:
    rng = np.random.default_rng(3)
    size = 0.0 if zero else 0.3
    layers = [
        (rng.normal(0, size, (WIDTH + len(FEATURES), 5)).astype(np.float32), rng.normal(0, size, 5).astype(np.float32)),
        (rng.normal(0, size, (5, 2)).astype(np.float32), rng.normal(0, size, 2).astype(np.float32)),
    ]
    info = HeadInfo(model="m", fingerprint=fingerprint, hidden_size=WIDTH)
    return RemainingHead(info, layers, survival_table(survival()))


def counts(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def by_hand(known: RemainingHead, state: np.ndarray, generated: int, left: int, submitted: int) -> tuple[float, float]:
    features = known.features(counts(generated), counts(left), counts(submitted))[0].tolist()
    value = [*state.tolist(), *features]
    for index, (weights, bias) in enumerate(known.layers):
        if index:
            value = [max(0.0, number) for number in value]
        value = [
            sum(v * w for v, w in zip(value, column, strict=True)) + b
            for column, b in zip(weights.T, bias, strict=True)
        ]
    median = value[0] + features[2]
    upper = median + math.log1p(math.exp(value[1]))
    p50, p90 = (min(max(math.expm1(number), 1.0), left) for number in (median, upper))
    return p50, p90


def test_estimates_equal_those_computed_number_by_number() -> None:
    known = head()
    states = RNG.normal(0, 1, (6, WIDTH)).astype(np.float32)
    generated, left, submitted = (
        counts(0, 1, 50, 200, 900, 20_000),
        counts(99, 5, 500, 1, 60, 300),
        counts(0, 9, 40, 300, 0, 7),
    )
    said = known.estimate(states, generated, left, submitted)
    for row in range(6):
        expected = by_hand(known, states[row], int(generated[row]), int(left[row]), int(submitted[row]))
        assert said[row].tolist() == pytest.approx(expected, rel=1e-4)
    assert (said[:, 0] <= said[:, 1]).all()


# --- files


def test_a_head_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / HEAD_FILE
    write_head(path, head())
    found = read_head(path, fingerprint="f")
    states = RNG.normal(0, 1, (3, WIDTH)).astype(np.float32)
    question = (states, counts(1, 2, 3), counts(9, 9, 9), counts(0, 5, 0))
    assert (found.estimate(*question) == head().estimate(*question)).all()
    assert found.info == head().info


@pytest.mark.parametrize("damage", ["torn", "empty", "no number", "narrow"])
def test_a_damaged_head_is_refused_with_its_file(tmp_path: Path, damage: str) -> None:
    path, broken = tmp_path / "head.safetensors", head()
    if damage == "no number":
        broken.layers[0][0][0, 0] = np.nan
    elif damage == "narrow":
        layers = [broken.layers[0], (broken.layers[1][0][:4], broken.layers[1][1])]
        broken = RemainingHead(broken.info, layers, broken.survival)
    write_head(path, broken)
    if damage in ("torn", "empty"):
        path.write_bytes(path.read_bytes()[:-20] if damage == "torn" else b"")
    with pytest.raises(HeadUnreadable, match=r"head\.safetensors"):
        read_head(path)


def test_a_head_of_other_weights_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    write_head(path, head(fingerprint="other"))
    with pytest.raises(HeadUnreadable, match="other weights"):
        read_head(path, fingerprint="f")
    with pytest.raises(OSError, match="No such file"):
        read_head(tmp_path / "none")


def sequence(prompt: int, length: int, *, generated: list[int] | None = None, **fields: Any) -> SequenceStates:
    at = generated if generated is not None else [0]
    states = RNG.normal(0, 1, (len(at), WIDTH)).astype("<f2").tobytes()
    known = {"ended": True, "max_tokens": 10_000, "submitted": 0, **fields}
    return SequenceStates([1, prompt], length, known["ended"], known["max_tokens"], known["submitted"], at, states)


def test_recorded_states_come_back_from_a_bounded_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_states, "OUTPUTS_MAX", 3)
    path = tmp_path / "deep" / "states"
    writer = state_writer(path, HEADER)
    written = [sequence(number, 10 + number) for number in range(8)]
    for one in written:
        writer.append([one])
    older = path.with_name("states.1")
    assert list(read_states([older, path])) == written[3:]
    assert states_header(path) == HEADER


def test_a_file_that_ends_inside_a_frame_ends_before_it_and_another_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "states"
    writer = state_writer(path, HEADER)
    for number in range(2):
        writer.append([sequence(number, 10)])
    path.write_bytes(path.read_bytes()[:-3])
    assert len(list(read_states([path]))) == 1
    wide = state_writer(path, StatesHeader(model="m", fingerprint="f", hidden_size=WIDTH + 1))
    wide.append([sequence(1, 10)])
    with pytest.raises(FileUnreadable, match="width"):
        list(read_states([path]))
    path.write_bytes(b"something else\n")
    with pytest.raises(FileUnreadable, match="no states"):
        list(read_states([path]))


def test_a_reservoir_is_a_uniform_sample_of_what_was_offered() -> None:
    seen = np.zeros(100)
    rng = random.Random(5)
    for _ in range(600):
        reservoir = StateReservoir(rng)
        for generated in range(100):
            reservoir.offer(generated, b"s")
        taken, states = reservoir.taken()
        assert len(taken) == len(states) == STATES_MAX
        assert taken == sorted(taken)
        seen[taken] += 1
    assert seen.mean() == pytest.approx(600 * STATES_MAX / 100)
    assert seen.min() > 55
    assert seen.max() < 145


# --- training


def telling(count: int, *, seed: int, noise: float = 0.05) -> list[SequenceStates]:
    """Requests whose states tell their rest in one of the columns, which no count does."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        length = int(rng.integers(5, 400))
        generated = sorted(rng.choice(length, min(4, length), replace=False).tolist())
        states = rng.normal(0, 1, (len(generated), WIDTH))
        states[:, 3] = np.log1p(length - np.array(generated)) + rng.normal(0, noise, len(generated))
        payload = states.astype("<f2").tobytes()
        made.append(SequenceStates([number, seed], length, True, 10_000, 0, generated, payload))
    return made


def test_a_head_learns_what_its_states_tell_and_is_accepted() -> None:
    result = train_head(telling(500, seed=1), header=HEADER, incumbent=None)
    assert result.accepted, result.reason
    assert result.scores["head"].error < 0.4 * result.scores["survival"].error
    assert 0.8 < result.scores["head"].covered_90 < 0.99
    assert result.head.info.fingerprint == "f"
    again = train_head(telling(500, seed=1), header=HEADER, incumbent=result.head)
    assert not again.accepted  # the same head is no better than itself


def test_too_few_requests_give_no_head() -> None:
    result = train_head(telling(HOLDOUT_MIN, seed=2), header=HEADER, incumbent=None)
    assert (result.head, result.accepted) == (None, False)
    assert "too few" in result.reason


def test_a_prompt_is_on_one_side_only_and_every_token_weighs_the_same() -> None:
    parts = [part_of([number, 4]) for number in range(4_000)]
    assert parts.count("held") / 4_000 == pytest.approx(0.25, abs=0.03)
    assert parts.count("tuning") / 4_000 == pytest.approx(0.10, abs=0.03)
    data = matrix([sequence(1, 100, generated=[0, 50, 90, 99]), sequence(2, 300, generated=[50])])
    assert by_request(np.array([4.0, 4.0, 4.0, 4.0, 8.0]), data).tolist() == [2.0, 12.0]
    said = np.tile(np.array([[10.0, 10.0, 20.0]]), (5, 1))
    error = 0.25 * (90 + 40 + 0 + 9) / 4 + 0.75 * 240
    assert weighted_score(said, data).error == pytest.approx(error)


def test_the_guard_wants_a_gain_beyond_chance() -> None:
    data = matrix([sequence(number, 100, generated=[0]) for number in range(100)])
    rest = data.rest.astype(float)
    exact = np.stack([rest, rest, rest], axis=1)
    assert judge(exact, exact + 10, data)[0]
    assert not judge(exact + 10, exact, data)[0]
    assert not judge(exact, exact, data)[0]
    assert not judge(exact * np.nan, exact + 10, data)[0]


def _recorded(path: Path, *, count: int = 500, informative: bool = True) -> Path:
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
    states = _recorded(tmp_path / "states", count=800)
    words = ["--from", str(states), "--model-path", str(tmp_path)]
    assert main(words) == 0
    assert "is better on" in capsys.readouterr().out
    head = read_head(tmp_path / HEAD_FILE, fingerprint="f")
    assert head.info.figures["head"]["error"] < head.info.figures["survival"]["error"]
    assert main(words) == 3
    assert main([*words, "--force"]) == 0


def test_states_that_tell_nothing_put_no_head_in_force(tmp_path: Path) -> None:
    states = _recorded(tmp_path / "states", informative=False)
    assert main(["--from", str(states), "--model-path", str(tmp_path)]) == 3
    assert not (tmp_path / HEAD_FILE).exists()
