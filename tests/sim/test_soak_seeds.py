"""Seeds of tests: a fixed number, half fixed, half of the commit; a failing one says how to run it again."""

import argparse

import pytest
from millrace.sim.failure import SimulationFailed

from simulator.soak import seeds as soak
from simulator.soak.seeds import SoakChoice, replay_command
from tests.sim import soak_seeds as drawn
from tests.sim.soak_seeds import commit, passed, pytest_command, replayed_by, soak_seeds


def test_half_of_the_seeds_are_the_first_ones_and_half_depend_on_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MILLRACE_SIM_SEEDS", raising=False)
    one, other = soak_seeds(10, of="abc"), soak_seeds(10, of="def")
    assert one == soak_seeds(10, of="abc")
    assert one[:5] == other[:5] == [0, 1, 2, 3, 4]
    assert not set(one[5:]) & set(other[5:])
    assert all(0 <= seed < drawn.SEED_MAX for seed in one)


def test_a_seed_that_fails_says_how_to_run_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawn, "run_seed", lambda *_args, **_options: "seed 17: what went wrong")
    with pytest.raises(pytest.fail.Exception, match=r"what went wrong\nagain: .* --first 17 --seeds 1 .*--migrations"):
        passed(17, "forecast", migrations=True)


def test_the_replay_command_names_every_choice_and_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = SoakChoice(policy="round_robin", trading=True, trading_policy="delay", wrong_estimates=True)
    command = replay_command(23, choice)
    ran: list[object] = []
    monkeypatch.setattr(soak, "run_seed", lambda *args: ran.append(args) or "failed")
    parser = argparse.ArgumentParser()
    soak.add_arguments(parser)
    options = parser.parse_args(command.split()[2:])
    assert list(soak._results(options)) == [(23, "failed")]
    assert ran == [(23, choice)]


def test_a_seed_that_draws_from_something_empty_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawing(*_: object) -> None:
        next(iter(()))

    monkeypatch.setattr(SoakChoice, "run_of", drawing)
    parser = argparse.ArgumentParser()
    soak.add_arguments(parser)
    with pytest.raises(RuntimeError, match="seed 5"):
        list(soak._results(parser.parse_args(["--seeds", "2", "--first", "5"])))


def test_a_run_of_another_shape_that_fails_says_how_to_run_it_again(request: pytest.FixtureRequest) -> None:
    command = pytest_command(request)
    assert command.startswith(f"MILLRACE_SIM_COMMIT={commit()} python -m pytest 'tests/sim/test_soak_seeds.py::")
    with pytest.raises(pytest.fail.Exception, match="seed 3: lost\nagain: MILLRACE_SIM_COMMIT="), replayed_by(command):
        raise SimulationFailed("seed 3: lost")
