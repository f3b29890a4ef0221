"""Engines of one host that slow each other: how much is learnt, and what follows from it."""

from __future__ import annotations

import random
from math import exp
from typing import Any

import pytest
from millrace.contracts.predictor import LatencyPrediction
from millrace.contracts.status import BatchComposition, StatusSnapshot

from services.predictor.mates import LATELY_NS, SILENCE_NS, WORD_NS, HostLoad, Hosts, Mate
from services.predictor.neighbours import NeighbourEffect
from tests.unit.predictor_rig import MS, START_NS, STEP_MS, Predictor, question, record, snapshot, status

SECOND = 1000 * MS


def observed(effect: NeighbourEffect, *, slowdown: float, seconds: int, pace: float = 1.3, seed: int = 0) -> None:
    """Observations of 20 ms; every half a second the neighbour begins or ends to compute."""
    rng = random.Random(seed)
    for number in range(seconds * 50):
        busy = number // 25 % 2
        measured = 20 * MS * pace * (1 + slowdown * busy) * exp(rng.gauss(0.0, 0.2))
        effect.observe(START_NS + number * 20 * MS, measured_ns=measured, predicted_ns=20 * MS, busy=busy)


@pytest.mark.parametrize("slowdown", [0.15, 0.3, 0.6])
def test_what_a_busy_neighbour_costs_is_learnt_from_steps(slowdown: float) -> None:
    effect = NeighbourEffect()
    observed(effect, slowdown=slowdown, seconds=120)
    assert effect.factor(1) == pytest.approx(1 + slowdown, rel=0.08)
    assert effect.factor(2) == pytest.approx(effect.factor(1) ** 2)


@pytest.mark.parametrize("seed", range(20))
def test_engines_that_do_not_disturb_each_other_come_out_with_nothing(seed: int) -> None:
    effect = NeighbourEffect()
    observed(effect, slowdown=0.0, seconds=30, seed=seed)
    assert effect.factor(1) < 1.01


def test_until_it_is_known_neighbours_cost_nothing() -> None:
    effect = NeighbourEffect()
    assert effect.factor(3) == 1.0
    effect.observe(START_NS, measured_ns=40 * MS, predicted_ns=20 * MS, busy=1)
    assert effect.factor(1) < 1.05  # one step that took twice as long says little


def test_an_effect_counts_more_the_surer_it_is() -> None:
    known = []
    for seconds in (2, 10, 30, 120):
        effect = NeighbourEffect()
        observed(effect, slowdown=0.25, seconds=seconds)
        known.append(effect.factor(1))
    assert known == sorted(known)
    assert known[0] < 1.15
    assert known[-1] > 1.22


def test_a_machine_that_gets_slower_by_itself_is_not_blamed_on_the_neighbour() -> None:
    effect = NeighbourEffect()
    for number in range(6_000):
        pace = 1 + number / 6_000
        at_ns = START_NS + number * 20 * MS
        effect.observe(at_ns, measured_ns=20 * MS * pace, predicted_ns=20 * MS, busy=number // 50 % 2)
    assert effect.value < 0.005


def test_a_neighbour_that_tells_nothing_any_more_counts_as_idle() -> None:
    hosts = Hosts()
    mate, other = (hosts.join(name, "host", NeighbourEffect()) for name in ("a", "b"))
    other.note(START_NS, sequences=3)
    assert mate.neighbours_now(START_NS + SILENCE_NS - 1) == 1
    assert mate.neighbours_now(START_NS + SILENCE_NS) == 0
    assert mate.neighbours_lately(START_NS + SILENCE_NS) > 0.8
    assert mate.neighbours_lately(START_NS + 20 * SECOND) < 0.01


def test_a_neighbour_whose_work_is_about_to_end_is_not_taken_as_busy_until_it_says_so() -> None:
    hosts = Hosts()
    mate, other = (hosts.join(name, "host", NeighbourEffect()) for name in ("a", "b"))
    other.note(START_NS, sequences=3, left_ns=300 * MS)
    assert mate.neighbours_now(START_NS + 299 * MS) == 1
    assert mate.neighbours_now(START_NS + 300 * MS) == 0
    other.note(START_NS + 300 * MS, sequences=1, left_ns=MS)  # it outran what was expected and goes on
    assert mate.neighbours_now(START_NS + 320 * MS) == 1


def test_only_instances_of_the_same_host_are_neighbours() -> None:
    hosts = Hosts()
    mates = {name: hosts.join(name, host, NeighbourEffect()) for name, host in (("a", "x"), ("b", "x"), ("c", "y"))}
    nowhere = [hosts.join(name, "", NeighbourEffect()) for name in ("d", "e")]
    mates["b"].note(START_NS, sequences=1)
    assert {name: mate.neighbours_now(START_NS) for name, mate in mates.items()} == {"a": 1, "b": 0, "c": 0}
    assert [mate.alone for mate in (*mates.values(), *nowhere)] == [False, False, True, True, True]
    hosts.leave("b")
    assert mates["a"].alone
    assert mates["a"].neighbours_now(START_NS) == mates["a"].neighbours_lately(START_NS) == 0
    moved = hosts.join("a", "y", NeighbourEffect())
    moved.note(START_NS, sequences=1)
    assert mates["c"].neighbours_now(START_NS) == 1


class SlowMate:
    """An engine as its neighbours should see it, computed from every word of it."""

    def __init__(self, effect: NeighbourEffect) -> None:
        self.effect = effect
        self.share, self.told_ns, self.until_ns, self.sequences = 0.0, START_NS, START_NS, 0

    def share_at(self, now_ns: int) -> float:
        busy_ns = min(now_ns, self.until_ns) - self.told_ns
        share = 1 - (1 - self.share) * 0.5 ** (busy_ns / LATELY_NS)
        return float(share * 0.5 ** ((now_ns - self.told_ns - busy_ns) / LATELY_NS))

    def note(self, now_ns: int, *, sequences: int, left_ns: int) -> None:
        self.share, self.told_ns, self.sequences = self.share_at(now_ns), now_ns, sequences
        self.until_ns = now_ns + min(SILENCE_NS, max(WORD_NS, left_ns)) if sequences else now_ns

    def delay(self, now_ns: int) -> float:
        return self.sequences * (self.effect.factor(1) - 1) if now_ns < self.until_ns else 0.0


@pytest.mark.parametrize("seed", range(10))
def test_a_hosts_sums_are_those_over_its_engines(seed: int) -> None:
    rng = random.Random(seed)
    hosts, effects = Hosts(), [NeighbourEffect() for _ in range(6)]
    for number, effect in enumerate(effects):
        observed(effect, slowdown=0.1 * number, seconds=20, seed=seed)
    mates = [hosts.join(f"w{number}", "host", effect) for number, effect in enumerate(effects)]
    slow = [SlowMate(effect) for effect in effects]
    now_ns = START_NS
    for _ in range(1_000):
        now_ns += rng.choice((0, MS, 20 * MS, 20 * MS, SECOND, 100 * SECOND if rng.random() < 0.05 else 0))
        told = rng.randrange(6)
        word = {"sequences": rng.choice((0, 1, 8)), "left_ns": rng.choice((MS, 100 * MS, SILENCE_NS))}
        for each in (mates[told], slow[told]):
            each.note(now_ns, **word)
        asked = rng.randrange(6)
        others = [each for number, each in enumerate(slow) if number != asked]
        assert mates[asked].neighbours_now(now_ns) == sum(now_ns < each.until_ns for each in others)
        lately = sum(each.share_at(now_ns) for each in others)
        assert mates[asked].neighbours_lately(now_ns) == pytest.approx(lately, abs=1e-9)
        delay = sum(each.delay(now_ns) for each in others)
        assert mates[asked].delay_ns(SECOND, now_ns) == pytest.approx(SECOND * delay, abs=2)


def test_a_host_waits_for_few_ends_however_often_its_engines_tell() -> None:
    host = HostLoad()
    mates = [Mate(host=host) for _ in range(4)]
    for step in range(10_000):
        mates[step % 4].note(START_NS + step * MS, sequences=1, left_ns=(step % 7) * 100 * MS)
    assert len(host._ends) <= 4 * 8


def test_a_host_that_was_silent_for_a_year_is_idle() -> None:
    hosts = Hosts()
    mate, other = (hosts.join(name, "host", NeighbourEffect()) for name in ("a", "b"))
    other.note(START_NS, sequences=3)
    later_ns = START_NS + 365 * 86_400 * SECOND
    assert mate.neighbours_now(later_ns) == mate.neighbours_lately(later_ns) == 0
    other.note(later_ns, sequences=1)
    assert mate.neighbours_now(later_ns) == 1


@pytest.mark.parametrize("neighbours", [1, 63])
def test_a_question_looks_at_no_neighbour_by_itself(neighbours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = Predictor()
    for number in range(neighbours + 1):
        predictor.register(record(f"w{number}", host="host"), key=f"w{number}")
        predictor.send(told(f"w{number}", 1, predictor.now_ns, duration_ns=STEP_MS * MS, sequences=2))
    looked: list[float] = []
    factor = NeighbourEffect.factor

    def counted(self: NeighbourEffect, busy: float) -> float:
        looked.append(busy)
        return factor(self, busy)

    monkeypatch.setattr(NeighbourEffect, "factor", counted)
    assert isinstance(predictor.ask(question(instance="w0")), LatencyPrediction)
    assert len(looked) == 1


def test_nobody_is_delayed_beside_an_idle_neighbour() -> None:
    hosts, known = Hosts(), NeighbourEffect()
    observed(known, slowdown=0.3, seconds=60)
    mate, other = hosts.join("a", "x", NeighbourEffect()), hosts.join("b", "x", known)
    other.note(START_NS, sequences=4)
    assert mate.delay_ns(SECOND, START_NS) == pytest.approx(4 * SECOND * (known.factor(1) - 1), rel=1e-6)
    other.note(START_NS, sequences=0)
    assert mate.delay_ns(SECOND, START_NS) == 0
    assert Mate().delay_ns(SECOND, START_NS) == 0


# in a predictor


def told(name: str, step: int, at_ns: int, *, duration_ns: int, sequences: int) -> StatusSnapshot:
    running = [status(f"{name}-r{index}.0", output_tokens=1, max_tokens=1_000) for index in range(sequences)]
    batch = BatchComposition(decodes=sequences, context_tokens=40 * sequences)
    return snapshot(
        name, step=step, at_ns=at_ns, running=running, blocks_free=400, step_duration_ns=duration_ns, batch=batch
    )


def served_beside(slowdown: float, *, host: str = "host", **config: Any) -> Predictor:
    """Two instances; w0 computes all the time, w1 every other second, and rests when this ends."""
    predictor = Predictor(**config)
    for name in ("w0", "w1"):
        predictor.register(record(name, host=host), key=name)
    for number in range(1_000):
        beside = number // 50 % 2 == 0
        predictor.now_ns += 20 * MS
        for name, sequences in (("w1", 4 if beside else 0), ("w0", 4)):
            duration_ns = round(STEP_MS * MS * (1 + slowdown * beside))
            predictor.send(told(name, number + 1, predictor.now_ns, duration_ns=duration_ns, sequences=sequences))
    return predictor


def test_a_prediction_tells_what_waking_an_instance_costs_those_beside_it() -> None:
    predictor = served_beside(0.5)
    idle, busy = (predictor.ask(question(instance=name)) for name in ("w1", "w0"))
    assert isinstance(idle, LatencyPrediction)
    assert isinstance(busy, LatencyPrediction)
    assert idle.neighbours_delay_ns == pytest.approx(4 * 0.5 * idle.e2e_ns, rel=0.25)
    assert busy.neighbours_delay_ns == 0


def test_neighbours_that_are_switched_off_delay_nobody() -> None:
    answer = served_beside(0.5, neighbours=False).ask(question(instance="w1"))
    assert isinstance(answer, LatencyPrediction)
    assert answer.neighbours_delay_ns == 0


@pytest.mark.parametrize(("slowdown", "host"), [(0.0, "host"), (0.5, "")])
def test_engines_with_a_host_of_their_own_or_that_do_not_slow_each_other_delay_nobody(
    slowdown: float, host: str
) -> None:
    answer = served_beside(slowdown, host=host).ask(question(instance="w1"))
    assert isinstance(answer, LatencyPrediction)
    assert answer.neighbours_delay_ns < 0.1 * answer.e2e_ns
