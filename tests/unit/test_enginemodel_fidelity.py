"""The modelled scheduler computes what real vLLM computed: every recorded run, every step, every block id."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from millrace.contracts.kv import KvGroup, KvNeed

from tests.testbed.schedule_recording import Happening, RecordedRun, replay

ALL = KvGroup(need=KvNeed.ALL, block_tokens=32, block_bytes=0)
#: The groups of the runs "windows" and "states", but with a longer window, and with a state more.
WINDOW = (ALL, *[KvGroup(need=KvNeed.WINDOW, block_tokens=32, block_bytes=0, window=96)] * 2)
STATE = (ALL, *[KvGroup(need=KvNeed.STATE, block_tokens=512, block_bytes=0)] * 3)
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


def test_layers_that_keep_a_state_or_a_window_are_among_the_runs_with_preemptions() -> None:
    runs = [run for run in map(read, RECORDINGS) if any(step.preempted for step in run.steps)]
    assert {group.need for run in runs for group in run.parameters.groups} == set(KvNeed)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("preemption", {"prefix_caching": False}), ("windows", {"groups": WINDOW}), ("states", {"groups": STATE})],
)
def test_a_changed_rule_would_be_noticed(name: str, changes: dict[str, Any]) -> None:
    run = next(read(path) for path in RECORDINGS if path.stem == name)
    other = msgspec.structs.replace(run, parameters=msgspec.structs.replace(run.parameters, **changes))
    assert replay(other) != run.steps
