"""Work for KV between an engine's steps: who waits for answers gets them one after the other."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from services.worker.vllm_engine import kv_mover
from services.worker.vllm_engine.kv_mover import Mover


class Clock:
    """Time that passes where it is told to, seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(kv_mover, "time", clock)
    return clock


class Owed:
    """An answer that takes so many bytes, and longer than a step's part for each share."""

    def __init__(self, clock: Clock, size: int) -> None:
        self.answer: Future[bytes] = Future()
        self.left = size
        self._clock = clock

    def advance(self, bytes_max: int) -> None:
        self._clock.now += 2 * kv_mover.WORK_SHARE * kv_mover.STEP_S
        self.left -= bytes_max
        if self.left <= 0 and not self.answer.done():
            self.answer.set_result(b"")


def mover(clock: Clock, jobs: list[Owed]) -> Any:
    made: Any = Mover.__new__(Mover)
    made._jobs = list(jobs)
    made._scheduler = SimpleNamespace(has_unfinished_requests=lambda: True)
    made._settings = SimpleNamespace(copy_bytes_per_step=100)
    made._worked_s = clock.now
    return made


def test_the_first_asked_for_is_answered_before_the_next_is_begun(clock: Clock) -> None:
    first, second = Owed(clock, 1_000_000), Owed(clock, 1_000_000)
    made = mover(clock, [first, second])
    for _ in range(2):
        made.work()
    assert first.left < 1_000_000
    assert second.left == 1_000_000
    while not first.answer.done():
        made.work()
    assert not second.answer.done()
    while made.owes():
        made.work()
    assert second.answer.done()


def test_a_longer_step_has_a_larger_share(clock: Clock) -> None:
    owed = Owed(clock, 1_000_000)
    made = mover(clock, [owed])
    made.work()
    short = 1_000_000 - owed.left
    clock.now += 10 * kv_mover.STEP_S
    before = owed.left
    made.work()
    assert before - owed.left >= 10 * 100 > short
