"""Length models: baselines, trees against LightGBM, the guard, and what becomes of damaged files."""

import zlib
from pathlib import Path

import lightgbm
import msgspec
import numpy as np
import pytest
from millrace.contracts.subjects import subject_token
from millrace.lengths import files
from millrace.lengths.baselines import HistoryHistogram
from millrace.lengths.features import FEATURES, PROMPT_TOKENS
from millrace.lengths.files import load_warm, outcome_writer, read_models, read_outcomes, write_model
from millrace.lengths.frames import FileUnreadable
from millrace.lengths.quantile import ModelUnreadable, QuantileModel, decode_model
from millrace.lengths.samples import LengthSample, matrix, pack, usable_lengths
from millrace.lengths.scoring import interval, score
from millrace.lengths.training import TrainingJob, train, train_candidate
from millrace.lengths.trees import FlatTrees, Forest, flatten

from services.tagger.config import LearningConfig
from services.tagger.shell import load

RNG = np.random.default_rng(5)


def _row(prompt_tokens: float = 10.0, **named: float) -> np.ndarray:
    row = np.zeros(len(FEATURES))
    row[PROMPT_TOKENS] = prompt_tokens
    for name, value in named.items():
        row[FEATURES.index(name)] = value
    return row


def _outcomes(count: int, *, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Lengths near ``number_span`` with noise: what a model can learn and a histogram of prompt lengths cannot."""
    rng = np.random.default_rng(seed)
    rows = np.zeros((count, len(FEATURES)))
    rows[:, PROMPT_TOKENS] = rng.integers(8, 12, count)
    spans = rng.integers(1, 300, count)
    rows[:, FEATURES.index("number_span")] = spans
    return rows, np.maximum(1, np.round(spans * rng.lognormal(0, 0.1, count)))


def _samples(count: int, *, seed: int = 1, scale: float = 1.0) -> list[LengthSample]:
    rows, lengths = _outcomes(count, seed=seed)
    return [
        LengthSample(pack(row), [max(1, int(length * scale))], False, "", 0, 0)
        for row, length in zip(rows, lengths, strict=True)
    ]


@pytest.fixture(scope="module")
def trained() -> QuantileModel:
    return train(*_outcomes(600), model="m")


def test_the_histogram_answers_by_bucket_of_prompt_length() -> None:
    model = HistoryHistogram()
    for _ in range(20):
        model.learn(_row(10), 100)
        model.learn(_row(1000), 7)
    short, long = model.estimate(_row(9)), model.estimate(_row(1020))
    assert 64 <= short.p50 < 128
    assert 4 <= long.p50 < 8


def test_the_histogram_falls_back_to_all_buckets_and_forgets() -> None:
    model = HistoryHistogram(window=2)
    model.learn(_row(10), 1000)
    model.learn(_row(10), 5)
    model.learn(_row(10), 5)
    said = model.estimate(_row(100_000))
    assert said.p90 < 8


def test_flat_trees_say_what_lightgbm_says() -> None:
    rows = RNG.normal(size=(400, 6))
    target = rows[:, 0] * 3 + np.abs(rows[:, 1]) + RNG.normal(size=400)
    common = {"verbosity": -1, "num_threads": 1, "use_missing": False}
    boosters = [
        lightgbm.train(common | {"objective": objective}, lightgbm.Dataset(rows, target), trees)
        for objective, trees in (("l2", 20), ("quantile", 7), ("l1", 3))
    ]
    forest = Forest(flatten([booster.dump_model() for booster in boosters]))
    expected = np.column_stack([booster.predict(rows, num_threads=1) for booster in boosters])
    assert np.allclose(forest.predict_many(rows), expected, atol=1e-5)
    assert np.allclose([forest.predict(row) for row in rows], expected, atol=1e-5)


def test_a_trained_model_follows_what_decides_the_length(trained: QuantileModel) -> None:
    for span in (20, 100, 250):
        said = trained.estimate(_row(number_span=span))
        assert said.p50 == pytest.approx(span, rel=0.25)
        assert said.mean == pytest.approx(span, rel=0.25)
        assert said.p50 <= said.p90


def test_about_nine_in_ten_lengths_lie_below_p90(trained: QuantileModel) -> None:
    rows, lengths = _outcomes(400, seed=4)
    assert 0.8 < score(trained.estimate_many(rows), lengths).covered_90 < 0.98


def test_the_models_that_ship_can_be_read() -> None:
    models, problems = read_models(None, shipped=True)
    assert set(models) == {"millrace-nano", "millrace-micro", "millrace-mini"}
    assert not problems


def _damaged(trained: QuantileModel, **fields) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(msgspec.structs.replace(trained.file, **fields)))


@pytest.mark.parametrize("payload", [b"", *map(zlib.compress, (b"\x93\x01\x02\x03", b"\x81\xa1\xff\x01"))])
def test_what_is_no_model_is_refused(payload: bytes) -> None:
    with pytest.raises(ModelUnreadable):
        decode_model(payload)


def test_a_model_of_other_features_is_refused_and_says_so(trained: QuantileModel) -> None:
    with pytest.raises(ModelUnreadable, match="train it again"):
        decode_model(_damaged(trained, feature_version=99))


@pytest.mark.parametrize(
    "damage",
    [
        {"thresholds": b"\x00"},
        {"values": b""},
        {"roots": (2**31 - 1).to_bytes(4, "little")},
        {"depth": 10**6},
        {"outputs": [7]},
        {"outputs": [0, 0, 1]},
        {"features": b"\xff\xff" * 10_000},
    ],
)
def test_damaged_trees_are_refused(trained: QuantileModel, damage: dict) -> None:
    trees: FlatTrees = msgspec.structs.replace(trained.file.trees, **damage)
    with pytest.raises(ModelUnreadable):
        decode_model(_damaged(trained, trees=trees))


def test_a_cut_file_is_refused_wherever_it_was_cut(trained: QuantileModel) -> None:
    whole = trained.encode()
    for size in range(0, len(whole), 997):
        with pytest.raises(ModelUnreadable):
            decode_model(whole[:size])


def test_a_better_candidate_replaces_history() -> None:
    result = train_candidate(TrainingJob(model="m", samples=_samples(800), incumbent=b"", at_ns=0))
    assert result.accepted, result.reason
    assert result.candidate.error < result.incumbent.error / 2


def test_a_worse_candidate_never_replaces_a_better_model(trained: QuantileModel) -> None:
    # The older outcomes, which the candidate learns from, are three times as long as what comes now.
    samples = [*_samples(600, scale=3.0), *_samples(200, seed=2)]
    result = train_candidate(TrainingJob(model="m", samples=samples, incumbent=trained.encode(), at_ns=0))
    assert not result.accepted
    assert "not better" in result.reason


def test_too_few_outcomes_give_no_model() -> None:
    result = train_candidate(TrainingJob(model="m", samples=_samples(30), incumbent=b"", at_ns=0))
    assert (result.model, result.accepted) == (b"", False)


def test_an_interval_holds_the_mean_and_narrows_with_more_outcomes() -> None:
    values = RNG.exponential(10, 2000)
    few, many = interval(values[:100], seed=1), interval(values, seed=1)
    assert few[0] < values[:100].mean() < few[1]
    assert many[1] - many[0] < few[1] - few[0]


@pytest.mark.parametrize(
    ("lengths", "reasons", "usable"),
    [
        ([5], ["stop"], ([5], False)),
        ([5, 9], ["stop", "length"], ([5, 9], True)),
        ([5], [], ([5], False)),
        ([5], ["cancelled"], ([], False)),
        ([0], ["stop"], ([], False)),
        ([-3], ["stop"], ([], False)),
        ([10**12], ["stop"], ([], False)),
        ([1] * 128, ["stop"] * 128, ([1] * 4, False)),
    ],
)
def test_only_believable_lengths_are_learnt(lengths: list[int], reasons: list[str], usable: tuple) -> None:
    assert usable_lengths(lengths, reasons) == usable


def test_samples_of_other_features_are_left_out() -> None:
    odd = LengthSample(b"\x00" * 8, [4], False, "", 0, 0)
    rows, lengths = matrix([odd])
    assert rows.shape == (0, len(FEATURES))
    assert len(lengths) == 0


def test_outcomes_survive_their_file_and_the_file_stays_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "OUTCOMES_MAX", 10)
    samples = _samples(45)
    for sample in samples:
        outcome_writer(tmp_path, "a.b", "tagger-0").append([sample])
    kept = load_warm(tmp_path / "a_b", "tagger-0", 100)
    assert kept == samples[-len(kept) :]
    assert 10 <= len(kept) <= 20


def test_files_of_a_model_that_is_served_under_a_path_stay_in_the_folder(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "lengths", tmp_path / "models" / "mini"
    elsewhere.mkdir(parents=True)
    outcome_writer(root, str(elsewhere), "tagger-0").append(_samples(1))
    assert not list(elsewhere.iterdir())
    loaded = load("tagger-0", LearningConfig(directory=str(root), pretrained=False))
    assert list(loaded.outcomes) == [subject_token(str(elsewhere))]


def test_a_damaged_file_of_outcomes_is_refused_by_name_and_begun_anew_by_the_writer(tmp_path: Path) -> None:
    path = tmp_path / "m" / "t.outcomes"
    path.parent.mkdir()
    path.write_bytes(b"something else\n" + b"\xff" * 100)
    with pytest.raises(FileUnreadable, match="outcomes: no outcomes"):
        list(read_outcomes(path))
    assert load_warm(tmp_path / "m", "t", 10) == []
    outcome_writer(tmp_path, "m", "t").append(_samples(1))
    assert len(list(read_outcomes(path))) == 1


def test_models_that_cannot_be_read_are_told_and_the_others_are_used(tmp_path: Path, trained: QuantileModel) -> None:
    write_model(tmp_path, "m", trained.encode())
    write_model(tmp_path, "damaged", b"nonsense")
    models, problems = read_models(tmp_path, shipped=False)
    assert list(models) == ["m"]
    assert [name for name in problems if "damaged" in name]
    assert not list(tmp_path.glob("*/.lengths*"))
