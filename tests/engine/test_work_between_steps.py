"""Work for KV between an engine's steps: who waits for answers gets them one after the other."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from services.worker.vllm_engine import kv_mover
from services.worker.vllm_engine.kv_mover import Mover


class Engine:
    """One that is busy, and owes answers of so many bytes, each share of which takes longer than a step's part."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *sizes: int) -> None:
        self.now = 100.0
        monkeypatch.setattr(kv_mover, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.jobs = [Owed(self, size) for size in sizes]
        self.mover: Any = Mover.__new__(Mover)
        self.mover._jobs = list(self.jobs)
        self.mover._scheduler = SimpleNamespace(has_unfinished_requests=lambda: True)
        self.mover._settings = SimpleNamespace(copy_bytes_per_step=100)
        self.mover._worked_s = self.now


class Owed:
    def __init__(self, engine: Engine, size: int) -> None:
        self.answer: Future[bytes] = Future()
        self.left = size
        self._engine = engine

    def advance(self, bytes_max: int) -> None:
        self._engine.now += 2 * kv_mover.WORK_SHARE * kv_mover.STEP_S
        self.left -= bytes_max
        if self.left <= 0 and not self.answer.done():
            self.answer.set_result(b"")


def test_the_first_asked_for_is_answered_before_the_next_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, 1_000_000, 1_000_000)
    first, second = engine.jobs
    while not first.answer.done():
        assert second.left == 1_000_000
        engine.mover.work()
    assert not second.answer.done()
    while engine.mover.owes():
        engine.mover.work()
    assert second.answer.done()


def test_a_longer_step_has_a_larger_share(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, 1_000_000)
    (owed,) = engine.jobs
    engine.mover.work()
    short = 1_000_000 - owed.left
    engine.now += 10 * kv_mover.STEP_S
    before = owed.left
    engine.mover.work()
    assert before - owed.left >= 10 * 100 > short
