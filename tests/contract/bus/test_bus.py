"""Contract of both buses: publish, request, queue groups, gather, malformed messages, timers, reconnects."""

import pytest
from millrace.actor.effects import (
    CancelTimer,
    Effect,
    Gather,
    Publish,
    Reply,
    Request,
    StartTimer,
    Subscribe,
    Unsubscribe,
)
from millrace.contracts.local import (
    BusDisconnected,
    BusReconnected,
    Gathered,
    Replied,
    RequestFailed,
    RequestFailure,
    TimerFired,
)
from millrace.contracts.message import ErrorReply, Message
from millrace.contracts.tagger import LengthTag, TagRequest

from tests.contract.bus.harness import Harness
from tests.contract.bus.probe import Probe, Rule

SECOND = 1_000_000_000
ASK = "mr.contract.tag.m"
#: For what holds of messages that leave the process only: size limits, and a bus that is away.
WIRE = pytest.mark.parametrize("bus", ["sim", "nats"], indirect=True)


def question(request: str = "r1") -> TagRequest:
    return TagRequest(request=request, model="m", prompt_tokens=3, max_tokens=10)


def ask(request: str = "r1", *, subject: str = ASK, timeout_s: float = 5.0) -> Request:
    return Request(subject=subject, body=question(request), correlation=request, timeout_ns=int(timeout_s * SECOND))


def answers(mean: float = 1.0) -> Rule:
    def rule(message: Message, _now_ns: int) -> list[Effect]:
        if isinstance(message.body, TagRequest) and message.reply_to:
            return [Reply(to=message.reply_to, body=LengthTag(request=message.body.request, mean=mean))]
        return []

    return rule


async def test_a_published_body_arrives_once_with_its_sender_and_trace(bus: Harness):
    hearer = await bus.add(Probe("hearer", Subscribe(subject="mr.contract.outcome.*")), LengthTag)
    speaker = await bus.add(Probe("speaker"))
    body = LengthTag(request="r", mean=2.5, source="history")
    bus.tell(speaker, Publish(subject="mr.contract.outcome.m", body=body, request="r", traceparent="00-aa-bb-01"))
    await bus.until(lambda: hearer.got)
    await bus.passes(0.1)
    assert hearer.got == [Message(body, "mr.contract.outcome.m", "speaker", "", "00-aa-bb-01")]


async def test_messages_of_one_sender_keep_their_order_over_all_subjects(bus: Harness):
    hearer = Probe("hearer", Subscribe(subject="mr.contract.a"), Subscribe(subject="mr.contract.b.>"))
    speaker = Probe("speaker")
    await bus.add(hearer, LengthTag)
    await bus.add(speaker)
    subjects = ["mr.contract.a", "mr.contract.b.x.y"]
    bus.tell(
        speaker, *[Publish(subject=subjects[number % 2], body=LengthTag(request=str(number))) for number in range(300)]
    )
    await bus.until(lambda: len(hearer.got) == 300)
    assert [body.request for body in hearer.bodies()] == [str(number) for number in range(300)]


async def test_after_unsubscribing_nothing_comes_any_more(bus: Harness):
    hearer = await bus.add(Probe("hearer", Subscribe(subject="mr.contract.a")), LengthTag)
    speaker = await bus.add(Probe("speaker"))
    bus.tell(hearer, Unsubscribe(subject="mr.contract.a"), Unsubscribe(subject="mr.contract.never"))
    await bus.passes(0.1)
    bus.tell(speaker, Publish(subject="mr.contract.a", body=LengthTag(request="r")))
    await bus.passes(0.1)
    assert hearer.got == []


async def test_a_request_gets_its_answer_with_the_answerers_name(bus: Harness):
    tagger = Probe("tagger", Subscribe(subject="mr.contract.tag.*", queue_group="tagger"), rule=answers(7.0))
    asker = Probe("asker")
    await bus.add(tagger, TagRequest)
    await bus.add(asker)
    bus.tell(asker, ask("r1"), ask("r2"))
    await bus.until(lambda: len(asker.got) == 2)
    assert asker.got == [
        Message(Replied(correlation=name, body=LengthTag(request=name, mean=7.0)), "", "tagger")
        for name in ("r1", "r2")
    ]


async def test_a_request_that_nobody_listens_to_fails_at_once(bus: Harness):
    asker = await bus.add(Probe("asker"))
    bus.tell(asker, ask("r1", timeout_s=60.0))
    await bus.until(lambda: asker.got)
    assert asker.bodies() == [RequestFailed(correlation="r1", reason=RequestFailure.NO_RESPONDERS)]


async def test_what_a_first_effect_leads_to_at_once_is_delivered_after_all_first_effects(bus: Harness):
    huge = TagRequest(request="r1", model="m", prompt_tokens=1, max_tokens=1, prompt="x" * 1_000_001)
    first = Request(subject=ASK, body=huge, correlation="huge", timeout_ns=60 * SECOND)
    asker = await bus.add(Probe("asker", first, Subscribe(subject=ASK)), TagRequest)
    await bus.until(lambda: asker.bodies(Replied))


async def test_a_request_without_an_answer_times_out_and_a_late_answer_is_dropped(bus: Harness):
    silent = await bus.add(Probe("silent", Subscribe(subject=ASK)), TagRequest)
    asker = await bus.add(Probe("asker"))
    bus.tell(asker, ask("r1", timeout_s=0.2))
    await bus.until(lambda: asker.got)
    assert asker.bodies() == [RequestFailed(correlation="r1", reason=RequestFailure.TIMEOUT)]
    bus.tell(silent, Reply(to=silent.got[0].reply_to, body=LengthTag(request="r1")))
    await bus.passes(0.2)
    assert len(asker.got) == 1


async def test_a_duplicated_answer_is_delivered_once(bus: Harness):
    def twice(message: Message, _now_ns: int) -> list[Effect]:
        body = LengthTag(request=message.body.request)
        return [Reply(to=message.reply_to, body=body), Reply(to=message.reply_to, body=body)]

    await bus.add(Probe("echo", Subscribe(subject=ASK), rule=twice), TagRequest)
    asker = await bus.add(Probe("asker"))
    bus.tell(asker, ask("r1"))
    await bus.until(lambda: asker.got)
    await bus.passes(0.2)
    assert len(asker.got) == 1


async def test_a_queue_group_shares_what_a_plain_subscriber_gets_whole(bus: Harness):
    members = [Probe(f"member-{index}", Subscribe(subject="mr.contract.work", queue_group="g")) for index in range(3)]
    watcher = Probe("watcher", Subscribe(subject="mr.contract.work"))
    speaker = Probe("speaker")
    for probe in (*members, watcher):
        await bus.add(probe, LengthTag)
    await bus.add(speaker)
    bus.tell(
        speaker, *[Publish(subject="mr.contract.work", body=LengthTag(request=str(number))) for number in range(150)]
    )
    await bus.until(lambda: len(watcher.got) == 150 and sum(len(member.got) for member in members) == 150)
    shared = sorted(int(body.request) for member in members for body in member.bodies())
    assert shared == list(range(150))
    assert all(member.got for member in members)


async def test_a_gather_ends_with_the_last_wanted_answer(bus: Harness):
    for index in range(3):
        await bus.add(Probe(f"p{index}", Subscribe(subject=ASK), rule=answers(float(index))), TagRequest)
    asker = await bus.add(Probe("asker"))
    bus.tell(asker, Gather(subjects=(ASK,), body=question(), correlation="g", timeout_ns=60 * SECOND, answers_max=3))
    await bus.until(lambda: asker.got)
    [gathered] = asker.bodies(Gathered)
    assert sorted(gathered.answers) == [(f"p{i}", LengthTag(request="r1", mean=float(i))) for i in range(3)]


async def test_a_gather_ends_at_its_deadline_with_what_it_has(bus: Harness):
    await bus.add(Probe("quick", Subscribe(subject=ASK), rule=answers()), TagRequest)
    await bus.add(Probe("silent", Subscribe(subject=ASK)), TagRequest)
    asker = await bus.add(Probe("asker"))
    bus.tell(asker, Gather(subjects=(ASK,), body=question(), correlation="g", timeout_ns=SECOND // 5, answers_max=2))
    await bus.until(lambda: asker.got)
    assert [sender for sender, _body in asker.bodies(Gathered)[0].answers] == ["quick"]
    await bus.passes(0.2)
    assert len(asker.got) == 1


async def test_a_gather_over_several_subjects_counts_those_that_nobody_hears_as_answered(bus: Harness):
    for index in range(2):
        tagger = Subscribe(subject=f"mr.contract.tag.m{index}", queue_group="tagger")
        await bus.add(Probe(f"p{index}", tagger, rule=answers(float(index))), TagRequest)
    asker = await bus.add(Probe("asker"))
    subjects = tuple(f"mr.contract.tag.m{index}" for index in range(3))
    bus.tell(asker, Gather(subjects=subjects, body=question(), correlation="g", timeout_ns=60 * SECOND, answers_max=3))
    await bus.until(lambda: asker.got)
    [gathered] = asker.bodies(Gathered)
    assert sorted(sender for sender, _body in gathered.answers) == ["p0", "p1"]


async def test_bytes_that_are_no_message_are_counted_and_kill_nobody(bus: Harness):
    hearer = await bus.add(Probe("hearer", Subscribe(subject="mr.contract.a")), LengthTag)
    for payload in (b"", b"\xff\xfe", b"\x81\xa4type\xa6Nope/9", b'{"json": true}'):
        await bus.publish_bytes("mr.contract.a", payload, sender="stranger")
    await bus.until(lambda: bus.refused() == 4)
    bus.tell(hearer, Publish(subject="mr.contract.a", body=LengthTag(request="still here")))
    await bus.until(lambda: hearer.got)
    assert hearer.bodies() == [LengthTag(request="still here")]


async def test_a_type_that_the_actor_does_not_take_is_answered_with_an_error(bus: Harness):
    narrow = await bus.add(Probe("narrow", Subscribe(subject=ASK)), LengthTag)
    asker = await bus.add(Probe("asker"))
    bus.tell(asker, ask("r1"))
    await bus.until(lambda: asker.got)
    [replied] = asker.bodies(Replied)
    assert isinstance(replied.body, ErrorReply)
    assert replied.body.reason == "unexpected"
    assert narrow.got == []
    assert bus.refused() == 1


@WIRE
async def test_a_body_that_is_too_large_is_answered_as_malformed(bus: Harness):
    await bus.add(Probe("tagger", Subscribe(subject=ASK), rule=answers()), TagRequest)
    asker = await bus.add(Probe("asker"))
    huge = TagRequest(request="r1", model="m", prompt_tokens=1, max_tokens=1, prompt="x" * 1_000_001)
    bus.tell(asker, Request(subject=ASK, body=huge, correlation="huge", timeout_ns=5 * SECOND), ask("r2"))
    await bus.until(lambda: len(asker.got) == 2)
    by_correlation = {body.correlation: body.body for body in asker.bodies(Replied)}
    assert by_correlation["huge"].reason == "malformed"
    assert by_correlation["r2"] == LengthTag(request="r2", mean=1.0)


def when_told(*delays_ns: int) -> Rule:
    """At the timer ``now``, starts ``t`` once per delay, each moving the one before."""

    def rule(message: Message, now_ns: int) -> list[Effect]:
        if message.body == TimerFired(name="now"):
            return [StartTimer(name="t", at_ns=now_ns + delay_ns) for delay_ns in delays_ns]
        return []

    return rule


@pytest.mark.parametrize("delays_s", [(0.1,), (0.05, 0.2), (5.0, 0.1)], ids=["started", "moved later", "moved sooner"])
async def test_a_timer_fires_once_at_its_last_time_and_never_early(bus: Harness, delays_s: tuple[float, ...]):
    probe = await bus.add(Probe("probe", rule=when_told(*[int(delay_s * SECOND) for delay_s in delays_s])))
    bus.tell(probe, StartTimer(name="now", at_ns=0))
    await bus.until(lambda: len(probe.got) == 2)
    now, due = probe.bodies()
    assert (now, due.name) == (TimerFired(name="now"), "t")
    due_ns = probe.times_ns[0] + int(delays_s[-1] * SECOND)
    assert probe.times_ns[1] >= due_ns
    assert due.at_ns in (0, due_ns)
    await bus.passes(0.3)
    assert len(probe.got) == 2


@WIRE
async def test_events_tell_that_the_bus_went_and_came_back_and_subscriptions_hold(bus: Harness):
    hearer = await bus.add(Probe("hearer", Subscribe(subject="mr.contract.a")), LengthTag)
    speaker = await bus.add(Probe("speaker"))
    await bus.stop_bus()
    await bus.until(lambda: hearer.bodies(BusDisconnected) and speaker.bodies(BusDisconnected))
    bus.tell(speaker, Publish(subject="mr.contract.a", body=LengthTag(request="lost")))
    await bus.passes(0.2)
    await bus.start_bus()
    await bus.until(lambda: hearer.bodies(BusReconnected) and speaker.bodies(BusReconnected))
    bus.tell(speaker, Publish(subject="mr.contract.a", body=LengthTag(request="after")))
    await bus.until(lambda: hearer.bodies(LengthTag))
    await bus.passes(0.1)
    assert hearer.bodies() == [BusDisconnected(), BusReconnected(), LengthTag(request="after")]


async def test_what_was_subscribed_while_the_bus_was_away_is_heard_afterwards(bus: Harness):
    hearer = await bus.add(Probe("hearer"), LengthTag)
    await bus.stop_bus()
    await bus.until(lambda: hearer.bodies(BusDisconnected))
    bus.tell(hearer, Subscribe(subject="mr.contract.a"))
    await bus.start_bus()
    await bus.until(lambda: hearer.bodies(BusReconnected))
    bus.tell(hearer, Publish(subject="mr.contract.a", body=LengthTag(request="r")))
    await bus.until(lambda: hearer.bodies(LengthTag))


@WIRE
async def test_open_requests_fail_when_the_bus_goes_and_new_ones_while_it_is_away(bus: Harness):
    await bus.add(Probe("silent", Subscribe(subject=ASK)), TagRequest)
    asker = await bus.add(Probe("asker"))
    gather = Gather(subjects=(ASK,), body=question(), correlation="g", timeout_ns=60 * SECOND, answers_max=2)
    bus.tell(asker, ask("open", timeout_s=60.0), gather)
    await bus.passes(0.1)
    await bus.stop_bus()
    await bus.until(lambda: asker.bodies(BusDisconnected))
    bus.tell(asker, ask("refused", timeout_s=60.0))
    await bus.until(lambda: len(asker.got) == 4)
    failed = asker.bodies(RequestFailed)
    assert [(body.correlation, body.reason) for body in failed] == [
        ("open", RequestFailure.DISCONNECTED),
        ("refused", RequestFailure.DISCONNECTED),
    ]
    assert asker.bodies(Gathered) == [Gathered(correlation="g", answers=[])]


async def test_timers_go_on_while_the_bus_is_away_and_a_cancelled_one_never_fires(bus: Harness):
    probe = await bus.add(Probe("probe"))
    await bus.stop_bus()
    await bus.until(lambda: probe.bodies(BusDisconnected))
    bus.tell(probe, StartTimer(name="gone", at_ns=0), CancelTimer(name="gone"), CancelTimer(name="unknown"))
    bus.tell(probe, StartTimer(name="t", at_ns=0))
    await bus.until(lambda: probe.bodies(TimerFired))
    await bus.passes(0.05)
    assert probe.bodies(TimerFired) == [TimerFired(name="t")]
