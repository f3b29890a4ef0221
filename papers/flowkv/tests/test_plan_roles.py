"""``papers.flowkv.plan_roles``: candidates in text, the best one as groups of the file, and what is refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from papers.flowkv.plan_roles import MISSED, main

FILE = """
[[models]]
name = "one"
path = "nano"

[[models.groups]]
name = "a"
count = 2
device = "a100"
step_time = "a100-llama-3-8b"
settings = { max_model_len = 8192 }

[[models.groups]]
name = "h"
count = 2
device = "h200"
step_time = "h200-llama-3-8b"
settings = { max_model_len = 8192 }
"""


def _plan(tmp_path: Path, *words: str, text: str = FILE) -> int:
    (tmp_path / "cluster.toml").write_text(text)
    return main([str(tmp_path / "cluster.toml"), *words])


def test_the_best_assignment_is_printed_as_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _plan(tmp_path, "--rate", "2") == 0
    text = capsys.readouterr().out
    assert "200 requests each" in text
    groups = msgspec.toml.decode(text.partition("groups of the file:\n")[2])["models"]["groups"]
    assert sum(group["count"] for group in groups) == 4
    assert {group["role"] for group in groups} in (
        {"both"},
        {"prefill", "decode"},
        {"prefill", "both"},
        {"both", "decode"},
    )


def test_objectives_that_nothing_keeps_are_told_by_the_exit_code(tmp_path: Path) -> None:
    assert _plan(tmp_path, "--rate", "2", "--tpot", "0.001") == MISSED


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rate", "0"], "--rate 0"),
        (["--rate", "1", "--lengths", "nothing"], "lengths 'nothing'"),
        (["--rate", "1", "--ttft", "0"], "ttft_s must be above 0"),
        (["--rate", "1", "--model", "two"], "--model two: one of one"),
    ],
)
def test_what_is_wrong_is_said(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _plan(tmp_path, *words) == 1
    assert said in capsys.readouterr().err


def test_a_group_without_step_times_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _plan(tmp_path, "--rate", "1", text=FILE.replace("h200-llama-3-8b", "nobody-measured")) == 1
    assert "group h: step_time 'nobody-measured' is unknown" in capsys.readouterr().err
