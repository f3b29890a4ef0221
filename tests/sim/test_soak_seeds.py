"""Seeds of soaks: a command that runs one again, and one that ends badly ends no other."""

import argparse

import pytest

from simulator.soak import seeds as soak
from simulator.soak.seeds import SoakChoice, replay_command


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
