"""The tagger's actor: it answers, it shows presence, it leaves."""

from __future__ import annotations

from millrace.actor.effects import Publish, Reply, StartTimer, Stop, Subscribe
from millrace.contracts.local import StopRequested, TimerFired
from millrace.contracts.message import Message
from millrace.contracts.status import PresenceState, ServicePresence
from millrace.contracts.tagger import LengthTag, TagRequest

from services.tagger.actor import HEARTBEAT_NS, TaggerActor


def _actor() -> TaggerActor:
    return TaggerActor(name="tagger-0", cluster="local", incarnation=7)


def test_it_joins_the_queue_group_so_that_taggers_share_the_work() -> None:
    subscriptions = [effect for effect in _actor().start(0) if isinstance(effect, Subscribe)]
    assert [(s.subject, s.queue_group) for s in subscriptions] == [("mr.local.tag.*", "tagger"), ("mr.local.outcome.*", "")]


def test_every_request_is_answered_with_unknown() -> None:
    request = TagRequest(request="r", model="m", prompt_tokens=3, max_tokens=9)
    effects = _actor().handle(Message(request, reply_to="_INBOX.x"), 5)
    assert effects == [Reply(to="_INBOX.x", body=LengthTag(request="r"), request="r")]


def test_a_request_that_wants_no_answer_gets_none() -> None:
    assert _actor().handle(Message(TagRequest(request="r", model="m", prompt_tokens=3, max_tokens=9)), 5) == []


def test_it_shows_presence_every_second() -> None:
    presence, timer = _actor().handle(Message(TimerFired(name="heartbeat")), 1000)
    assert isinstance(presence, Publish)
    assert isinstance(presence.body, ServicePresence)
    assert (presence.body.state, presence.body.incarnation) == (PresenceState.ALIVE, 7)
    assert timer == StartTimer(name="heartbeat", at_ns=1000 + HEARTBEAT_NS)


def test_asked_to_stop_it_says_that_it_leaves() -> None:
    presence, stop = _actor().handle(Message(StopRequested()), 1000)
    assert isinstance(presence, Publish)
    assert isinstance(presence.body, ServicePresence)
    assert presence.body.state is PresenceState.LEAVING
    assert isinstance(stop, Stop)
