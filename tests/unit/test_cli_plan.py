"""``millrace plan --cascade``: the front in text, what is missing, the plan that --apply would write;
and cascades in ``millrace status``.
"""

import json
import math
from pathlib import Path
from random import Random

import msgspec
import pytest
from millrace.cascade.jobs import PlanningResult
from millrace.cli.__main__ import main
from millrace.cli.cascade_table import cascade_rows
from millrace.cli.cluster_view import ClusterView
from millrace.cli.plan import MISSED, OPERATOR, applied
from millrace.cli.status_table import cluster_tables
from millrace.cluster.cascade_spec import CascadeSpec
from millrace.contracts.cascade import CascadePlan, CascadeTier, FrontPoint
from rich.console import Console

from services.coordinator.cascades import OPERATOR as KEPT_BY_COORDINATORS

FILE = """
models = [{ name = "small", path = "nano" }, { name = "large", path = "mini" }]
[cascade]
tiers = ["small", "large"]
"""
CHOSEN = FrontPoint(thresholds=[40.0], instances=[1, 1], shares=[1.0, 0.3], quality=61.0, quality_low=59.0, p95_s=2.5)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster's file, and answers of the two shipped models behind it: the large one is right far more often."""
    rng, lines = Random(3), []
    for index in range(450):
        sure = -rng.expovariate(0.5)
        small = {"right": rng.random() < math.exp(sure), "logprobs": [round(1000 * sure)], "output_tokens": 20}
        large = {"right": rng.random() < 0.9, "logprobs": [-5] * 30}
        answers = {"millrace-nano": small, "millrace-mini": large}
        lines.append(json.dumps({"prompt": f"q{index}", "prompt_tokens": 40, "answers": answers}))
    (tmp_path / "answers.jsonl").write_text("\n".join(lines))
    (tmp_path / "cluster.toml").write_text(FILE)
    (tmp_path / "bare.toml").write_text(FILE.partition("[cascade]")[0])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _plan(*words: str) -> int:
    return main(["plan", "--cascade", "cluster.toml", "--rate", "1", "--sample", "answers.jsonl", *words])


def test_the_front_is_printed_and_a_quality_out_of_reach_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _plan("--quality", "70") == 0
    text = capsys.readouterr().out
    assert "1 requests/s, 2 instances" in text
    assert "for the instances of the file" in text
    assert "that keep quality 70" in text
    assert _plan("--quality", "99.5") == MISSED
    assert "TARGET MISSED: no routing keeps quality 99.5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cascade", "cluster.toml", "--rate", "1", "--sample", "answers.jsonl"], "nothing to plan for"),
        (["--cascade", "cluster.toml", "--rate", "1", "--quality", "70"], "no recorded answers"),
        (["--cascade", "cluster.toml", "--rate", "0", "--quality", "70", "--sample", "answers.jsonl"], "--rate 0"),
        (["--cascade", "missing.toml", "--rate", "1", "--quality", "70"], "missing.toml"),
        (["--cascade", "bare.toml", "--rate", "1", "--quality", "70"], "has no [cascade]"),
        (["--cascade", "cluster.toml", "--rate", "1", "--quality", "70", "--sample", "cluster.toml"], "toml, line 1"),
    ],
)
def test_what_is_missing_is_said(words: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 1
    assert said in capsys.readouterr().err


def test_a_plan_to_apply_keeps_the_instances_in_force_and_names_a_person_as_its_author() -> None:
    tiers = [CascadeTier(model="small", threshold=70.0, instances=3), CascadeTier(model="large")]
    before = CascadePlan(cascade="c", epoch=6, tiers=tiers, coordinator="coordinator-0")
    result = PlanningResult(chosen=CHOSEN, meets=True, reason="r", front=[CHOSEN])
    plan = applied(CascadeSpec(name="c", tiers=["small", "large"]), before, result)
    assert (plan.epoch, plan.coordinator, plan.quality) == (7, OPERATOR, 61.0)
    assert [(tier.threshold, tier.share) for tier in plan.tiers] == [(40.0, 1.0), (0.0, 0.3)]
    assert plan.tiers[0].instances == 3
    assert plan.front == [CHOSEN]
    assert OPERATOR == KEPT_BY_COORDINATORS


def test_status_shows_tiers_thresholds_and_what_is_expected() -> None:
    tiers = [CascadeTier(model="small", threshold=62.5, instances=2), CascadeTier(model="large", share=0.25)]
    plan = CascadePlan(
        cascade="front", epoch=4, tiers=tiers, quality=58.5, quality_low=56.5, p95_ns=2_500_000_000, meets=False,
        reason="why",
    )  # fmt: skip
    view = ClusterView()
    view.hear_stored("cascade", [plan], 1)
    console = Console(width=120)
    with console.capture() as captured:
        console.print(cluster_tables("local", view, 1))
    said = "quality 58.5 (at least 56.5), p95 2.50 s"
    for words in ("front (epoch 4)", "62.5", "any", "25%", said, "below its target"):
        assert words in captured.get()
    (row,) = cascade_rows(view.cascades())
    assert [tier["instances"] for tier in row["tiers"]] == [2, 0]
    assert msgspec.json.encode(row)
    view.hear_stored("cascade", [], 2)
    assert view.cascades() == []
