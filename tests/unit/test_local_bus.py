"""Delivery between actors of one process: who gets what, and what still goes to the server."""

from types import SimpleNamespace
from typing import Any

import pytest
from millrace.actor.cell import Cell
from millrace.actor.effects import Reply
from millrace.actor.effects_nats import EffectCarrier
from millrace.actor.local_bus import LocalBus
from millrace.actor.meter import RuntimeMeter
from millrace.contracts.catalog import Role
from millrace.contracts.message import Body, Message
from millrace.contracts.permissions import permissions
from millrace.contracts.tagger import LengthTag
from millrace.sim.stand_in import StandIn
from prometheus_client import CollectorRegistry

METER = RuntimeMeter(CollectorRegistry())
BODY = LengthTag(request="r")


class NamedActor(StandIn):
    """Nothing but its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def handle(self, message: Message, now_ns: int) -> list[Any]:
        return []


def cell(name: str, role: Role | None = None) -> Cell:
    made = Cell(actor=NamedActor(name), accepts=(), handlers={}, meter=METER)
    made.permissions = permissions(role, "local") if role is not None else None
    return made


class Listening:
    """A local bus with what it handed over."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Message]] = []
        self.bus = LocalBus(lambda taker, message: self.heard.append((taker.name, message)))

    def names(self) -> list[str]:
        return [name for name, _ in self.heard]


def test_a_published_message_reaches_every_local_subscriber_and_the_server() -> None:
    listening, speaker = Listening(), cell("speaker")
    for name, pattern in (("a", "mr.x.outcome.*"), ("b", "mr.x.>"), ("c", "mr.x.tag.*")):
        listening.bus.subscribe(cell(name), pattern, "")
    assert not listening.bus.take(speaker, "mr.x.outcome.m", BODY, traceparent="00-aa-bb-01")
    assert listening.names() == ["a", "b"]
    assert listening.heard[0][1] == Message(BODY, "mr.x.outcome.m", "speaker", "", "00-aa-bb-01")


def test_a_question_stays_where_somebody_here_answers() -> None:
    listening, asker = Listening(), cell("asker")
    listening.bus.subscribe(cell("predictor"), "mr.x.predict.*.*", "predictor")
    listening.bus.subscribe(cell("other"), "mr.x.tag.*", "")
    assert listening.bus.take(asker, "mr.x.predict.m.i", BODY, reply="_INBOX.ingress.1.2")
    assert listening.bus.take(asker, "mr.x.tag.m", BODY, reply="_INBOX.ingress.1.3")
    assert not listening.bus.take(asker, "mr.x.elsewhere", BODY, reply="_INBOX.ingress.1.4")
    replies = [(name, message.reply_to[-3:]) for name, message in listening.heard]
    assert replies == [("predictor", "1.2"), ("other", "1.3")]
    assert getattr(listening.bus.answerer(("mr.x.predict.m.i", "mr.x.predict.m.j")), "name", "") == "predictor"
    assert listening.bus.answerer(("mr.x.predict.m.i", "mr.x.tag.m")) is None


def test_one_member_of_a_queue_group_takes_a_message_and_the_server_gets_none() -> None:
    listening = Listening()
    for name in ("a", "b"):
        listening.bus.subscribe(cell(name), "mr.x.work", "group")
    for _ in range(3):
        assert listening.bus.take(cell("speaker"), "mr.x.work", BODY)
    assert listening.names() == ["a", "b", "a"]


def test_routes_follow_subscriptions() -> None:
    listening, speaker, hearer = Listening(), cell("speaker"), cell("hearer")
    assert not listening.bus.take(speaker, "mr.x.work", BODY)
    listening.bus.subscribe(hearer, "mr.x.*", "group")
    assert listening.bus.take(speaker, "mr.x.work", BODY)
    listening.bus.unsubscribe(hearer, "mr.x.*")
    assert not listening.bus.take(speaker, "mr.x.work", BODY)
    assert listening.names() == ["hearer"]


def test_remembered_routes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.actor.local_bus.ROUTES_MAX", 4)
    listening = Listening()
    listening.bus.subscribe(cell("hearer"), "mr.x.>", "")
    for number in range(20):
        listening.bus.take(cell("speaker"), f"mr.x.{number}", BODY)
    assert len(listening.heard) == 20
    assert len(listening.bus._routes) <= 4


def test_an_actor_is_answered_in_its_process_whatever_the_role_of_who_answers_may_publish() -> None:
    """A broker asks the migrator that hosts it, in the inbox of that one's user."""
    carrier = EffectCarrier.__new__(EffectCarrier)
    answers: list[tuple[str, Body]] = []
    inbox = SimpleNamespace(
        prefix="_INBOX.migrator.0123.", take_local=lambda subject, _, body, __: answers.append((subject, body))
    )
    carrier.local, carrier.inbox = LocalBus(lambda *_: None), inbox  # type: ignore[assignment]
    carrier._on_reply(cell("migrator-0", Role.MIGRATOR), Reply(to="_INBOX.migrator.0123.7", body=BODY))
    assert answers == [("_INBOX.migrator.0123.7", BODY)]


def test_an_actor_of_a_shared_process_has_the_permissions_of_its_role() -> None:
    predictor, alone = cell("predictor-0", Role.PREDICTOR), cell("any")
    assert predictor.may_subscribe("mr.local.status.*.*")
    assert not predictor.may_subscribe("mr.local.tokens.ingress-0")
    for _ in range(2):  # looked up, and remembered
        assert predictor.may_publish("_INBOX.ingress.0123.7")
        assert predictor.may_publish("_INBOX.ingress.0123.8")
        assert not predictor.may_publish("mr.local.engine.worker-0.submit")
    assert alone.may_publish("mr.local.engine.worker-0.submit")
    assert alone.may_subscribe("mr.local.tokens.ingress-0")
