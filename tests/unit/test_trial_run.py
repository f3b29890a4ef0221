"""The trial of a changed instance by `millrace apply`."""

import pytest
from millrace.cli.cluster_rows import InstanceRow
from millrace.cli.trial_run import ENOUGH, IDLE_LOOKS, TrialRun


def row(instance: str, running: int, rate: float | None, model: str = "m") -> InstanceRow:
    return InstanceRow(
        instance=instance, model=model, stage="", state="ready", running=running, output_tokens_per_s=rate
    )


def tried(*rows: InstanceRow, looks: int = ENOUGH) -> TrialRun:
    trial = TrialRun("m", ["w0"])
    for _ in range(looks):
        trial.look(rows)
    return trial


@pytest.mark.parametrize(
    ("changed", "unchanged", "slower"),
    [
        ((4, 40.0), (4, 40.0), 1.0),
        ((4, 10.0), (4, 40.0), 4.0),
        ((4, 40.0), (4, 10.0), 0.25),
        ((8, 40.0), (4, 40.0), 1.0),  # twice the batch may take twice as long
        ((8, 10.0), (4, 40.0), 4.0),
        ((2, 10.0), (4, 40.0), 2.0),  # and half of it no longer
    ],
)
def test_a_token_of_a_changed_instance_is_compared_with_what_its_batch_may_take_elsewhere(changed, unchanged, slower):
    assert tried(row("w0", *changed), row("w1", *unchanged)).slower() == pytest.approx(slower)


def test_an_instance_that_gives_no_token_is_far_slower():
    slower = tried(row("w0", 4, 0.0), row("w1", 4, 40.0)).slower()
    assert slower is not None
    assert slower > 100


def test_too_little_to_compare_is_said():
    assert tried(row("w0", 4, 40.0), row("w1", 4, 40.0), looks=ENOUGH - 1).slower() is None
    assert tried(row("w0", 4, 40.0), row("w1", 0, 0.0)).slower() is None
    assert tried(row("w0", 4, None), row("w1", 4, 40.0)).slower() is None
    assert tried(row("w0", 4, 40.0), row("w1", 4, 40.0, model="other")).slower() is None


def test_a_model_without_requests_is_idle():
    assert tried(row("w0", 0, 0.0), row("w1", 4, 40.0, model="other"), looks=IDLE_LOOKS).idle
    assert not tried(row("w0", 0, 0.0), row("w1", 4, 40.0), looks=IDLE_LOOKS).idle
