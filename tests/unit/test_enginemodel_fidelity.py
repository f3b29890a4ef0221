"""The modelled scheduler computes what real vLLM computed: every recorded run, every step, every block id."""

from pathlib import Path

import msgspec
import pytest

from tests.testbed.schedule_recording import Happening, RecordedRun, replay

RECORDINGS = sorted((Path(__file__).resolve().parents[1] / "engine" / "recordings").glob("*.json"))


def read(path: Path) -> RecordedRun:
    return msgspec.json.decode(path.read_bytes(), type=RecordedRun)


def test_there_are_at_least_twenty_runs_and_they_cover_what_they_claim() -> None:
    runs = [read(path) for path in RECORDINGS]
    assert len(runs) >= 20
    assert sum(any(step.preempted for step in run.steps) for run in runs) >= 5
    assert sum(any(happening is Happening.CANCEL for happening, _ in run.log) for run in runs) >= 3
    assert sum(run.parameters.async_scheduling for run in runs) >= 3
    assert any(before and count > 1 for run in runs for step in run.steps for _, count, before in step.batch)


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_the_model_forms_the_same_batches_with_the_same_blocks(path: Path) -> None:
    run = read(path)
    steps = replay(run)
    for index, (modelled, recorded) in enumerate(zip(steps, run.steps, strict=True)):
        assert modelled == recorded, f"step {index} of {len(steps)}"


def test_a_changed_rule_would_be_noticed() -> None:
    run = next(read(path) for path in RECORDINGS if path.stem == "preemption")
    other = msgspec.structs.replace(run, parameters=msgspec.structs.replace(run.parameters, prefix_caching=False))
    assert replay(other) != run.steps
