"""The trial of a changed instance by `millrace apply`."""

import pytest
from millrace.cli.cluster_rows import InstanceRow
from millrace.cli.trial_run import IDLE_S, LOOK_S, TRIAL_S, WARM_S, TrialRun

#: Running sequences, and the tokens that they give in a second.
Does = tuple[int, float]


def tried(does: dict[str, Does], seconds: float = TRIAL_S, model: str = "m", slow_start: float = 1.0) -> TrialRun:
    """``slow_start``: times as slow that w0 is while it gets warm."""
    trial, tokens = TrialRun("m", ["w0"]), dict.fromkeys(does, 1_000.0)
    for look in range(round(seconds / LOOK_S) + 1):
        rows = [
            InstanceRow(
                instance=name,
                model="m" if name == "w0" else model,
                stage="",
                state="ready",
                running=running,
                output_tokens=round(tokens[name]),
            )
            for name, (running, _) in does.items()
        ]
        trial.look(rows, look * LOOK_S)
        for name, (_, rate) in does.items():
            tokens[name] += rate * LOOK_S / (slow_start if name == "w0" and look * LOOK_S < WARM_S else 1.0)
    return trial


@pytest.mark.parametrize(
    ("changed", "unchanged", "slower"),
    [
        ((4, 40.0), (4, 40.0), 1.0),
        ((4, 8.0), (4, 40.0), 5.0),
        ((4, 40.0), (4, 8.0), 0.2),
        ((8, 40.0), (4, 40.0), 1.0),  # twice the batch may take twice as long
        ((8, 8.0), (4, 40.0), 5.0),
        ((2, 8.0), (4, 40.0), 2.5),  # and half of it no longer
    ],
)
def test_a_token_of_a_changed_instance_is_compared_with_what_its_batch_may_take_elsewhere(changed, unchanged, slower):
    assert tried({"w0": changed, "w1": unchanged, "w2": unchanged}).slower() == pytest.approx(slower)


def test_an_engines_first_steps_do_not_count_and_one_that_gives_no_token_is_far_slower():
    assert tried({"w0": (4, 40.0), "w1": (4, 40.0)}, slow_start=40.0).slower() == pytest.approx(1.0)
    assert tried({"w0": (4, 0.0), "w1": (4, 40.0)}).slower() > 100


def test_too_little_to_compare_is_said():
    assert tried({"w0": (4, 40.0), "w1": (4, 40.0)}, seconds=1.5).slower() is None
    assert tried({"w0": (4, 40.0), "w1": (0, 0.0)}).slower() is None
    assert tried({"w0": (0, 0.0), "w1": (4, 40.0)}).slower() is None
    assert tried({"w0": (4, 40.0), "w1": (4, 40.0)}, model="other").slower() is None


def test_a_model_without_requests_is_idle():
    assert tried({"w0": (0, 0.0), "w1": (4, 40.0)}, seconds=IDLE_S + LOOK_S, model="other").idle
    assert not tried({"w0": (0, 0.0), "w1": (4, 40.0)}).idle
