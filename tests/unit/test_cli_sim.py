"""Options of `millrace sim`: none that was given is ignored."""

import os

import pytest

from simulator.__main__ import main
from simulator.commands.sim import processes

SCENARIO = ["--scenario", "any.toml"]


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["--policy", "round_robin"], "--set dispatch.policy=NAME"),
        (["--first", "0"], "--set seed=N"),
        (["--migrations"], "--set migration.on=true"),
        (["--verbose"], "--output FOLDER"),
    ],
)
def test_a_scenario_refuses_by_name_what_it_would_ignore(
    words: list[str], instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", *SCENARIO, *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"millrace sim: {words[0]} is for random load and faults")
    assert instead in said


@pytest.mark.parametrize("words", [["--set", "seed=1"], ["--sweep", "seed=1,2"], ["--output", "out"]])
def test_random_load_and_faults_refuse_what_only_a_scenario_takes(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", *words]) == 2
    assert f"{words[0]} is for scenarios" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [[], SCENARIO])
@pytest.mark.parametrize("option", ["--seeds", "--jobs"])
def test_no_seeds_and_no_processes_are_no_run(kind: list[str], option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", *kind, option, "0"]) == 2
    assert f"{option} must be at least 1, is 0" in capsys.readouterr().err


def test_variants_of_a_scenario_run_on_all_cores_unless_told() -> None:
    assert processes(None, scenario=True) == os.cpu_count()
    assert processes(1, scenario=True) == 1
    assert processes(None, scenario=False) == 1


def test_a_scenario_that_is_not_there_is_no_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--scenario", "/nowhere/any.toml", "--seeds", "2"]) == 1
    assert capsys.readouterr().err == "millrace sim: /nowhere/any.toml: No such file or directory\n"
