"""Membership: states by events, what counts as a sign of life, bounds."""

import random

import msgspec
import pytest
from millrace.contracts.status import InstanceRecord, InstanceSummary, PresenceState, ServicePresence
from millrace.membership.config import MembershipConfig
from millrace.membership.member import Member, MemberEvent, MemberState, next_state
from millrace.membership.members import Membership
from millrace.membership.services import EXCUSED_NS_MAX, ServiceLiveness

from tests.testbed.messages import plain_record, plain_summary

S, E = MemberState, MemberEvent
MS = 1_000_000
SILENCE_NS = 1_500 * MS


def record(name: str = "w0", incarnation: int = 5, **changes: object) -> InstanceRecord:
    sizes = {"max_model_len": 1_024, "token_budget": 128, "blocks_total": 64}
    return plain_record(name, incarnation=incarnation, **(sizes | changes))


def summary(name: str = "w0", incarnation: int = 5, *, at_ns: int, draining: bool = False) -> InstanceSummary:
    return plain_summary(name, incarnation=incarnation, at_ns=at_ns, blocks_free=64, blocks_total=64, draining=draining)


def presence(state: PresenceState, incarnation: int = 5, *, name: str = "w0", at_ns: int = 0) -> ServicePresence:
    return ServicePresence(role="worker", name=name, incarnation=incarnation, at_ns=at_ns, state=state)


@pytest.fixture
def members() -> Membership:
    return Membership(silence_ns=SILENCE_NS, members_max=4)


def known(members: Membership, name: str = "w0") -> Member:
    member = members.find(name)
    members.check_invariants()
    return member


def test_the_table_in_the_docstring_is_the_table_in_force():
    text = __import__("millrace.membership.member", fromlist=["x"]).__doc__ or ""
    rows = [[cell.strip() for cell in line.strip(" |").split("|")] for line in text.splitlines() if "|" in line]
    events = [MemberEvent(name) for name in rows[0][1:]]
    assert set(events) == set(MemberEvent)
    written = {(MemberState(row[0]), event): row[1:][i] for row in rows[2:] for i, event in enumerate(events)}
    assert len(written) == len(MemberState) * len(MemberEvent)
    for (state, event), after in written.items():
        assert next_state(state, event) == after, f"{state} after {event}"


def test_a_planned_instance_is_unknown_until_it_is_heard(members: Membership):
    members.expect("w0")
    assert known(members).state is S.UNKNOWN
    members.expire(10 * SILENCE_NS)
    assert known(members).state is S.UNKNOWN, "it was never there to fall silent"
    change = members.on_record("w0", record(), 1)
    assert (change.before, known(members).state, change.restarted) == (S.UNKNOWN, S.SERVING, False)


def test_a_repeated_record_is_no_sign_of_life(members: Membership):
    members.on_record("w0", record(), 0)
    members.on_record("w0", record(), SILENCE_NS)
    assert [each.name for each in members.expire(SILENCE_NS + 1)] == ["w0"]
    assert members.expire(SILENCE_NS + 2) == [], "told once"


def test_a_changed_record_is_told(members: Membership):
    assert members.on_record("w0", record(), 0).rerecorded
    assert not members.on_record("w0", record(), 0).rerecorded
    assert members.on_record("w0", record(max_sequences=9), 0).rerecorded


def test_silence_ends_with_a_summary_or_a_snapshot(members: Membership):
    members.on_record("w0", record(), 0)
    assert members.state(known(members), SILENCE_NS) is S.SERVING
    assert members.state(known(members), SILENCE_NS + 1) is S.SILENT
    members.on_summary(summary(at_ns=2 * SILENCE_NS), 2 * SILENCE_NS)
    assert known(members).state is S.SERVING
    members.expire(4 * SILENCE_NS)
    assert known(members).state is S.SILENT
    assert members.observe("w0", 5, 4 * SILENCE_NS).moved
    assert known(members).state is S.SERVING


def test_a_draining_instance_that_was_silent_is_heard_as_draining(members: Membership):
    members.on_summary(summary(at_ns=1, draining=True), 1)
    members.expire(10 * SILENCE_NS)
    members.observe("w0", 5, 10 * SILENCE_NS)
    assert known(members).state is S.DRAINING


def test_replayed_and_late_summaries_change_nothing(members: Membership):
    members.on_summary(summary(at_ns=5), 5)
    assert not members.on_summary(summary(at_ns=5, draining=True), 6).accepted
    assert not members.on_summary(summary(incarnation=4, at_ns=9), 9).accepted
    assert known(members).heard_ns == 5


def test_a_new_incarnation_says_that_the_earlier_one_is_lost(members: Membership):
    members.on_record("w0", record(), 0)
    members.on_summary(summary(at_ns=1), 1)
    change = members.on_summary(summary(incarnation=6, at_ns=1), 2)
    assert change.restarted
    assert not members.on_record("w0", record(incarnation=5), 3).accepted
    assert not members.on_record("w0", record(incarnation=6), 3).restarted


def test_death_holds_against_late_summaries_and_ends_with_the_next_incarnation(members: Membership):
    members.on_summary(summary(at_ns=1), 1)
    assert members.on_presence(presence(PresenceState.DEAD)).moved
    assert not members.on_summary(summary(at_ns=2), 2).accepted
    assert not members.observe("w0", 5, 3).accepted
    assert known(members).state is S.DEAD
    assert members.on_record("w0", record(incarnation=6), 4).restarted
    assert known(members).state is S.SERVING


def test_a_death_without_an_incarnation_is_that_of_all_before_it(members: Membership):
    members.on_summary(summary(incarnation=50, at_ns=1), 1)
    members.on_presence(presence(PresenceState.DEAD, 0, at_ns=49))
    assert known(members).state is S.SERVING
    members.on_presence(presence(PresenceState.DEAD, 0, at_ns=50))
    assert known(members).state is S.DEAD


def test_presences_of_other_roles_and_strangers_change_nothing(members: Membership):
    members.on_summary(summary(at_ns=1), 1)
    other = ServicePresence(role="ingress", name="w0", incarnation=5, at_ns=9, state=PresenceState.DEAD)
    assert not members.on_presence(other).accepted
    assert members.on_presence(presence(PresenceState.DEAD, name="w9")).member is None
    assert known(members).state is S.SERVING


def test_leaving_and_handing_back_mean_draining_until_a_summary_says_otherwise(members: Membership):
    members.on_summary(summary(at_ns=1), 1)
    members.on_presence(presence(PresenceState.LEAVING, 4))
    assert known(members).state is S.SERVING, "that was an earlier incarnation's"
    members.on_presence(presence(PresenceState.LEAVING))
    assert known(members).state is S.DRAINING
    members.on_summary(summary(at_ns=2), 2)
    members.withdraw("w0")
    assert known(members).state is S.DRAINING


def test_a_lost_record_ends_nothing_that_reports(members: Membership):
    members.on_record("w0", record(), 0)
    change = members.on_record("w0", None, 1)
    assert (known(members).state, known(members).record, change.rerecorded) == (S.SERVING, None, True)
    members.expire(SILENCE_NS + 1)
    assert known(members).state is S.GONE, "silent and not registered"
    members.on_summary(summary(at_ns=2), 2 * SILENCE_NS)
    assert known(members).state is S.SERVING


def test_after_an_outage_silence_is_counted_anew(members: Membership):
    members.on_summary(summary(at_ns=1), 1)
    members.restart_timers(9 * SILENCE_NS)
    assert members.expire(10 * SILENCE_NS) == []
    assert len(members.expire(10 * SILENCE_NS + 1)) == 1


def test_an_observer_that_stood_still_counts_silence_without_that_time(members: Membership):
    members.on_summary(summary(at_ns=1), 1)
    members.excuse(5 * SILENCE_NS, 5 * SILENCE_NS)
    assert members.expire(6 * SILENCE_NS) == []
    assert len(members.expire(6 * SILENCE_NS + 2)) == 1


def test_a_record_under_a_foreign_key_is_ignored(members: Membership):
    assert not members.on_record("w1", record("w0"), 0).accepted
    assert len(members) == 0


def test_names_that_are_no_token_are_found_by_both(members: Membership):
    members.on_record("a_b", record("a.b"), 0)
    assert members.find("a.b") is members.find("a_b") is not None
    members.on_record("a_b", None, 0)
    assert known(members, "a.b").record is None


def test_the_number_is_bounded_and_those_that_are_gone_make_room(members: Membership):
    for index in range(4):
        members.on_summary(summary(f"w{index}", at_ns=1), 1)
    assert members.on_summary(summary("w4", at_ns=1), 1).member is None
    members.on_summary(summary("w0", at_ns=2, draining=True), 2)
    members.on_record("w0", None, 2)
    assert members.on_summary(summary("w4", at_ns=2), 2).accepted
    assert members.find("w0") is None
    members.check_invariants()


def say_something(members: Membership, rng: random.Random, name: str, now_ns: int) -> None:
    incarnation, at_ns, token = rng.randrange(1, 9), now_ns - rng.randrange(10), name.replace(".", "_")
    heard = summary(name, incarnation, at_ns=at_ns, draining=rng.random() < 0.3)
    told = presence(rng.choice(list(PresenceState)), rng.choice([0, incarnation]), name=name, at_ns=3)
    saying = (
        lambda: members.expect(name),
        lambda: members.on_record(token, record(name, incarnation), now_ns),
        lambda: members.on_record(token, None, now_ns),
        lambda: members.on_summary(heard, now_ns),
        lambda: members.observe(name, incarnation, now_ns),
        lambda: members.on_presence(told),
        lambda: members.withdraw(name),
        lambda: members.expire(now_ns),
        lambda: members.restart_timers(now_ns),
    )
    rng.choice(saying)()


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_in_whatever_order_invariants_hold(members: Membership, seed: int):
    rng, now_ns = random.Random(seed), 0
    for _ in range(500):
        now_ns += rng.randrange(SILENCE_NS // 2)
        name = rng.choice(["w0", "w1", "a.b", "w3", "w4", "w5"])
        held = members.find(name)
        incarnation = held.incarnation if held is not None else 0
        say_something(members, rng, name, now_ns)
        members.check_invariants()
        assert held is None or members.find(name) is not held or held.incarnation >= incarnation


def test_wrong_thresholds_are_refused_by_name():
    with pytest.raises(msgspec.ValidationError, match="members_max"):
        msgspec.convert({"members_max": 0}, MembershipConfig)
    assert MembershipConfig(instance_silence_ms=4_000).plan_silence_ns == 8 * 10**9


def test_services_are_bounded_and_a_renewal_is_told_once():
    services = ServiceLiveness(services_max=3)
    services.heard("i0", 1)
    assert not services.renewed("i0", 5), "the first incarnation replaces none"
    assert services.renewed("i0", 6)
    assert not services.renewed("i0", 6)
    for index in range(3):
        services.heard(f"n{index}", 2)
    assert services.incarnation("i0") == 0
    assert len(services.take_silent(10, silence_ns=5)) == 3
    assert services.take_silent(10, silence_ns=5) == []


def test_a_service_is_silent_once_and_one_that_is_heard_again_gets_twice_the_time_until_it_is_another():
    services = ServiceLiveness()
    services.heard("i0", 10)
    assert services.take_silent(14, silence_ns=5) == []
    services.excuse(20, 20)
    assert services.take_silent(24, silence_ns=5) == []
    assert services.take_silent(25, silence_ns=5) == ["i0"]
    assert services.take_silent(27, silence_ns=5) == []
    services.heard("i0", 28)
    assert services.take_silent(43, silence_ns=5) == []
    assert services.take_silent(44, silence_ns=5) == ["i0"]
    services.heard("i0", 44 + EXCUSED_NS_MAX)
    services.renewed("i0", 2)
    assert services.take_silent(49 + EXCUSED_NS_MAX, silence_ns=5) == ["i0"]
