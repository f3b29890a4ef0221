"""A recorded run of one engine, replayed: a simulation that is given its step times must give its latencies."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from bench.live.recording import figures, read, read_all, write
from bench.live.replay import fits, replay, scenario
from bench.live.statistics import e2e_errors
from bench.live.transit import transit
from tests.unit.test_bench_live_figures import recorded


def test_a_replay_has_the_latencies_of_the_run(tmp_path: Path) -> None:
    recording = recorded(300)
    fitted = fits([recording])
    spec = scenario(recording, fitted=fitted, way=transit([recording]), folder=tmp_path)
    again = replay(spec, tmp_path, fitted=fitted)
    real = figures(recording)
    assert [figure.output_tokens for figure in again] == [figure.output_tokens for figure in real]
    assert np.mean([f.e2e_s for f in again]) == pytest.approx(np.mean([f.e2e_s for f in real]), rel=0.1)


def test_forecasts_of_a_replay_know_stated_lengths(tmp_path: Path) -> None:
    recording = msgspec.structs.replace(recorded(300), policy="forecast")
    fitted = fits([recording])
    spec = scenario(recording, fitted=fitted, way=transit([recording]), folder=tmp_path)
    told = e2e_errors(replay(spec, tmp_path, fitted=fitted))
    assert spec.workload.stated
    assert told.count >= 290
    assert told.median < 0.2


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    recording = recorded(40)
    assert read(write(recording, tmp_path)) == recording
    assert read_all(tmp_path) == [recording]


def test_a_folder_without_recordings_and_a_damaged_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=tmp_path.name):
        read_all(tmp_path)
    (tmp_path / "stated-0-forecast.run").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="stated-0-forecast"):
        read_all(tmp_path)
