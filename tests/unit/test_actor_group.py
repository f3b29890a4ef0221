"""Actors hosted as one: each gets its own, and hears the others at once."""

from millrace.actor.effects import Effect, Log, Publish, Request, StartTimer, Stop, Subscribe, WatchKeys
from millrace.actor.group import ActorGroup
from millrace.contracts.coordinator import OrderAccepted
from millrace.contracts.local import BusReconnected, KeyChanged, Replied, StopRequested, TimerFired
from millrace.contracts.message import Body, Message


class Part:
    """Says at start what it is told to, and notes what it hears."""

    def __init__(self, name: str, *begins: Effect, answers: dict[str, list[Effect]] | None = None) -> None:
        self.name = name
        self.begins = list(begins)
        self.answers = answers or {}
        self.heard: list[Body] = []

    def start(self, now_ns: int) -> list[Effect]:
        return self.begins

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        self.heard.append(message.body)
        return self.answers.get(type(message.body).__name__, [])

    def snapshot(self) -> dict[str, str]:
        return {self.name: "here"}

    def check_invariants(self) -> None:
        assert self.name


BODY = OrderAccepted(detail="x")


def test_a_subject_that_two_want_is_subscribed_once_and_reaches_both():
    first, second = (Part(name, Subscribe(subject="a.*"), WatchKeys(bucket="plan")) for name in ("first", "second"))
    group = ActorGroup(first, second, Part("third"))
    assert group.start(0) == [Subscribe(subject="a.*"), WatchKeys(bucket="plan")]
    changed = KeyChanged(bucket="plan", key="k", value=None, revision=1)
    for message in (Message(BODY, "a.b"), Message(BODY, "b.b"), Message(changed)):
        group.handle(message, 0)
    assert first.heard == second.heard == [BODY, changed]
    assert group.parts[2].heard == []


def test_what_one_publishes_reaches_the_others_at_once_and_the_bus():
    speaks = Part("first", answers={"TimerFired": [Publish(subject="a.b", body=BODY)]})
    log = Log(level="info", event="heard", fields={})
    hears = Part("second", Subscribe(subject="a.*"), answers={"OrderAccepted": [log]})
    group = ActorGroup(speaks, hears)
    group.start(0)
    assert group.handle(Message(TimerFired(name="tick")), 0) == [Publish(subject="a.b", body=BODY), log]
    assert hears.heard == [BODY]


def test_timers_and_answers_come_back_to_who_asked():
    ask = Request(subject="x", body=BODY, correlation="mine", timeout_ns=1)
    parts = [Part(name, StartTimer(name="tick", at_ns=5), ask) for name in ("first", "second")]
    group = ActorGroup(*parts)
    _, _, timer, request = group.start(0)
    group.handle(Message(TimerFired(name=timer.name, at_ns=5)), 6)
    group.handle(Message(Replied(correlation=request.correlation, body=BODY)), 6)
    assert parts[0].heard == []
    assert parts[1].heard == [TimerFired(name="tick", at_ns=5), Replied(correlation="mine", body=BODY)]


def test_a_periodic_timer_keeps_step_unless_it_is_late_by_a_period():
    fired = TimerFired(name="tick", at_ns=100)
    ends = [StartTimer.again(fired, now_ns, 50).at_ns for now_ns in (100, 103, 149, 150)]
    assert ends == [150, 150, 150, 200]
    assert StartTimer.again(TimerFired(name="tick"), 103, 50) == StartTimer(name="tick", at_ns=153)


def test_events_of_the_process_reach_all_and_the_first_parts_stop_is_the_last_effect():
    log = Log(level="info", event="bye", fields={})
    first = Part("first", answers={"StopRequested": [Stop(reason="first")]})
    second = Part("second", answers={"StopRequested": [log, Stop(reason="second")]})
    group = ActorGroup(first, second)
    group.handle(Message(BusReconnected()), 0)
    assert group.handle(Message(StopRequested()), 0) == [log, Stop(reason="first")]
    assert first.heard == second.heard == [BusReconnected(), StopRequested()]
    assert (group.name, group.snapshot()) == ("first", {"first": "here", "second": "here"})
