"""Share of time that prompts take, from the sequences that appear among the running ones."""

from __future__ import annotations

import pytest
from millrace.contracts.status import SequenceState, SequenceStatus
from millrace.policies.stages.digest import STARTS

from services.broker.prompts import DECAY_S, PromptWork

S = 1_000_000_000


def running(name: str, prompt: int = 1_000) -> SequenceStatus:
    return SequenceStatus(name, SequenceState.RUNNING, prompt, prompt, 1, 100, 1, 0)


def a_tenth(decodes: int, tokens: int) -> float:
    return 1e-4 * tokens


def test_a_prompt_a_second_of_a_tenth_of_a_second_is_a_tenth_of_the_time() -> None:
    work = PromptWork()
    for second in range(120):
        work.look([running(f"r{second}"), running("old")], (), a_tenth, second * S)
    shares = work.shares()
    assert sum(shares) == pytest.approx(0.1, rel=0.05)
    assert STARTS[len(shares) - 1] <= 1_000 < STARTS[len(shares)]


def test_it_is_known_soon_after_the_start() -> None:
    work = PromptWork()
    for second in range(4):
        work.look([running(f"r{second}")], (), a_tenth, second * S)
    assert sum(work.shares()) == pytest.approx(0.1, rel=0.1)


def test_what_came_with_its_kv_or_was_there_at_first_costs_nothing() -> None:
    work = PromptWork()
    work.look([running("first")], (), a_tenth, 0)
    assert work.shares() == []
    work.look([running("first"), running("moved")], {"moved"}, a_tenth, S)
    assert work.shares() == []


def test_prompts_of_long_ago_are_forgotten() -> None:
    work = PromptWork()
    work.look([], (), a_tenth, 0)
    work.look([running("a")], (), a_tenth, S)
    work.look([running("a")], (), a_tenth, round((1 + 5 * DECAY_S) * S))
    assert sum(work.shares()) < 1e-4
