"""The simulation itself: seeds, kills, partitions, faulty links, failures that can be repeated."""

from collections.abc import Callable
from typing import Any

import pytest
from millrace.actor.effects import Effect, Reply, Request, StartTimer, Subscribe
from millrace.contracts.local import Replied, RequestFailed, TimerFired
from millrace.contracts.message import Body, Message
from millrace.contracts.tagger import LengthTag, TagRequest
from millrace.sim.checkers.queues import BoundedQueues
from millrace.sim.failure import SimulationFailed
from millrace.sim.links import LinkModel
from millrace.sim.runtime_sim import MILLISECOND, SECOND, Simulation
from millrace.sim.stand_in import StandIn

FAULTY = LinkModel(jitter_ns=200_000, loss=0.05, duplicate=0.05, reorder=0.1)


class Asker:
    """Sends a numbered request every 10 ms."""

    def __init__(self, name: str = "asker") -> None:
        self.name = name
        self.asked = 0
        self.ended: list[tuple[str, str]] = []
        self.heard: list[str] = []

    def start(self, now_ns: int) -> list[Effect]:
        return [StartTimer(name="tick", at_ns=now_ns + 10 * MILLISECOND)]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        match message.body:
            case TimerFired():
                self.asked += 1
                body = TagRequest(request=str(self.asked), model="m", prompt_tokens=1, max_tokens=1)
                tick = StartTimer(name="tick", at_ns=now_ns + 10 * MILLISECOND)
                return [Request(subject="tag", body=body, correlation=str(self.asked), timeout_ns=SECOND), tick]
            case Replied(correlation=correlation):
                self.ended.append((correlation, "replied"))
            case RequestFailed(correlation=correlation, reason=reason):
                self.ended.append((correlation, reason.value))
            case other:
                self.heard.append(type(other).__name__)
        return []

    def snapshot(self) -> dict[str, Any]:
        return {"open": self.asked - len(self.ended)}

    def check_invariants(self) -> None:
        assert len(self.ended) <= self.asked


class Answerer(StandIn):
    """Answers everything; counts what it got."""

    def __init__(self, incarnation: int, *, breaks_at: int = 0) -> None:
        self.name = "answerer"
        self.incarnation = incarnation
        self.got = 0
        self._breaks_at = breaks_at

    def start(self, now_ns: int) -> list[Effect]:
        return [Subscribe(subject="tag", queue_group="taggers")]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        if isinstance(message.body, TagRequest):
            self.got += 1
            assert self.got != self._breaks_at, "as the test wants it"
            return [Reply(to=message.reply_to, body=LengthTag(request=message.body.request))]
        return []


class PartlyChecked(Answerer):
    """Its state contradicts itself from the eighth request on, where a message touches it or elsewhere."""

    def __init__(self, incarnation: int, *, touched: bool) -> None:
        super().__init__(incarnation)
        self._touched = touched

    def check_touched(self, body: Body) -> None:
        assert self.got < 8 or not self._touched

    def check_invariants(self) -> None:
        assert self.got < 8


def cluster(seed: int, answers: Callable[[int], Answerer] = Answerer, **options: Any) -> tuple[Simulation, Any, Any]:
    simulation = Simulation(seed, **options)
    answerer = simulation.add(answers, node="b", accepts=(TagRequest,))
    asker = simulation.add(lambda _incarnation: Asker(), node="a", accepts=())
    return simulation, asker, answerer


def outcomes(asker: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for _correlation, outcome in asker.actor.ended:
        counts[outcome] = counts.get(outcome, 0) + 1
    return counts


def test_a_faulty_link_loses_and_repeats_and_yet_every_request_ends_once():
    simulation, asker, answerer = cluster(3, link=FAULTY)
    simulation.run_for(60 * SECOND)
    simulation.faults.change_link("a", LinkModel())
    simulation.run_for(2 * SECOND)
    correlations = [correlation for correlation, _outcome in asker.actor.ended]
    assert len(set(correlations)) == len(correlations)
    assert outcomes(asker)["timeout"] > 100
    assert answerer.actor.got > 6000 * 0.9
    assert simulation.counts["late_reply"] > 0


def test_a_killed_actor_hears_nothing_and_comes_back_as_a_new_incarnation():
    simulation, asker, answerer = cluster(1)
    first = answerer.actor
    between_ticks = SECOND + 5 * MILLISECOND
    simulation.after(between_ticks, simulation.faults.kill, answerer)
    simulation.after(between_ticks + SECOND, simulation.start, answerer)
    simulation.run_for(3 * SECOND)
    assert first.got == 100
    assert answerer.actor is not first
    assert answerer.actor.incarnation == first.incarnation + between_ticks + SECOND
    assert outcomes(asker)["no_responders"] == 100


@pytest.mark.parametrize(("touched", "found_at"), [(True, 8), (False, 16)])
def test_what_a_message_touched_is_checked_at_once_and_the_rest_each_16th_time(touched: bool, found_at: int):
    simulation, _, answerer = cluster(1, lambda start: PartlyChecked(start, touched=touched))
    with pytest.raises(SimulationFailed):
        simulation.run_for(SECOND)
    assert answerer.actor.got == found_at


def test_the_state_at_the_end_is_checked_in_full():
    simulation, _, _ = cluster(1, lambda start: PartlyChecked(start, touched=False))
    simulation.run_for(100 * MILLISECOND)
    with pytest.raises(AssertionError):
        simulation.finish()


def test_timers_of_a_killed_actor_never_fire():
    simulation, asker, _ = cluster(1)
    first = asker.actor
    simulation.after(SECOND, simulation.faults.kill, asker)
    simulation.run_for(2 * SECOND)
    assert first.asked <= 100


def test_a_short_partition_costs_messages_and_nobody_is_told():
    simulation, asker, _ = cluster(1)
    simulation.after(SECOND, simulation.faults.partition, "b")
    simulation.after(3 * SECOND, simulation.faults.heal, "b")
    simulation.run_for(6 * SECOND)
    assert outcomes(asker)["timeout"] == 200
    assert asker.actor.heard == []


def test_a_long_partition_is_noticed_on_both_sides():
    simulation, asker, _ = cluster(1)
    simulation.after(SECOND, simulation.faults.partition, "b")
    simulation.after(31 * SECOND, simulation.faults.heal, "b")
    simulation.run_for(40 * SECOND)
    counts = outcomes(asker)
    assert counts["timeout"] > 1000  # until the server notices, it still believes in the connection
    assert counts["no_responders"] > 1000
    assert counts["replied"] > 800


def test_an_actor_that_starts_while_the_bus_is_away_starts_when_it_is_back():
    simulation, _, answerer = cluster(1)
    simulation.faults.kill(answerer)
    simulation.faults.stop_bus()
    simulation.run_for(SECOND)
    simulation.start(answerer)
    simulation.run_for(SECOND)
    assert answerer.process is None
    simulation.faults.start_bus()
    simulation.run_for(2 * SECOND)
    assert answerer.actor.got > 100


def test_a_handler_that_raises_fails_the_simulation_with_its_seed_and_last_deliveries():
    simulation, _, _ = cluster(77, lambda incarnation: Answerer(incarnation, breaks_at=5))
    with pytest.raises(SimulationFailed, match=r"(?s)seed 77.*as the test wants it.*answerer +TagRequest"):
        simulation.run_for(SECOND)


def test_a_queue_over_its_bound_is_found():
    simulation, _, _ = cluster(1)
    simulation.check_with(BoundedQueues({"open": 20}))
    simulation.after(SECOND, simulation.faults.partition, "b")
    with pytest.raises(AssertionError, match="open of asker"):
        simulation.run_for(5 * SECOND)


def test_a_bound_of_what_no_actor_tells_is_an_error():
    simulation, _, _ = cluster(1)
    simulation.check_with(BoundedQueues({"opne": 250}))
    simulation.run_for(SECOND)
    with pytest.raises(AssertionError, match="no actor's snapshot has"):
        simulation.finish()
