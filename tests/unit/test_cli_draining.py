"""`millrace drain` of the last instance of a model."""

from __future__ import annotations

import pytest
from millrace.cli.cluster_rows import InstanceRow
from millrace.cli.drain import spare_the_last
from millrace.cli.errors import CliError


def row(instance: str, state: str = "ready", model: str = "m") -> InstanceRow:
    return InstanceRow(instance=instance, model=model, stage="s0", state=state, running=2, waiting=1)


OTHERS = [row("w1", "draining"), row("w2", "drained"), row("w3", "dead"), row("v0", model="n")]


def test_the_last_ready_instance_of_a_model_is_not_drained_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        CliError, match=r"w0 is the last ready instance of m: its 3 requests have nowhere to go.*--force"
    ):
        spare_the_last([row("w0"), *OTHERS], row("w0"), force=False)
    spare_the_last([row("w0"), *OTHERS], row("w0"), force=True)
    assert "warning: w0 is the last ready instance of m" in capsys.readouterr().err


def test_one_of_several_is_drained_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    spare_the_last([row("w0"), row("w9"), *OTHERS], row("w0"), force=False)
    spare_the_last([row("w0", "draining"), *OTHERS], row("w0", "draining"), force=False)
    assert capsys.readouterr().err == ""
