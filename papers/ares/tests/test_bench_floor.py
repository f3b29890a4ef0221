"""Room elsewhere at the time of a preemption."""

from papers.ares.bench.ares_floor import preempted
from simulator.scenarios.observer import EngineSample


def sample(at: int, name: str, used: int, preemptions: int, running: int = 10) -> EngineSample:
    return EngineSample(at, name, running, 0, used, 100, preemptions, 0)


def test_room_is_what_was_idle_before_the_preemption() -> None:
    samples = [
        sample(1, "decode-0", 100, 0),
        sample(1, "decode-1", 93, 0),
        sample(1, "prefill", 20, 0),
        sample(2, "decode-0", 90, 2),
        sample(2, "decode-1", 10, 0),
        sample(2, "prefill", 90, 0),
    ]
    (found,) = preempted(samples)
    assert (found.count, found.needed) == (2, 10.0)
    assert (found.decoders, found.elsewhere) == (7, 87)
    assert round(found.idle, 3) == 0.035


def test_without_a_preemption_nothing_is_told() -> None:
    assert list(preempted([sample(1, "decode-0", 100, 3), sample(2, "decode-0", 100, 3)])) == []
    assert list(preempted([])) == []
