"""The migrator as mechanism: a broker decides what leaves, and the built-in initiator acts only where none is heard."""

import msgspec
import pytest
from millrace.contracts.broker import EvacuationAnnounced
from millrace.contracts.kv import KvRefusal
from millrace.contracts.local import BusReconnected
from millrace.contracts.message import Message
from millrace.contracts.migration import (
    EvacuateInstance,
    InstanceEvacuated,
    MigrateSequence,
    MigrationFinished,
    MigrationOutcome,
    MigrationReason,
)
from millrace.contracts.plan import InstanceRole
from millrace.contracts.status import PresenceState, SequenceState, SequenceStatus, ServicePresence
from millrace.policies.migration.leaving import LeavingQuestion, leaving, longest_rest_first

from services.migrator.delegation import Delegation
from services.migrator.orders import ORDERS_MAX, FinishedOrders
from services.migrator.state import ASKERS_MAX
from tests.unit.migrator_rig import MS, Rig

SILENCE_NS = 1_500 * MS


def presence(
    *instances: str, name: str = "b0", state: PresenceState = PresenceState.ALIVE, incarnation: int = 1
) -> ServicePresence:
    return ServicePresence(
        role="broker", name=name, incarnation=incarnation, at_ns=0, state=state, instances=list(instances)
    )


def speak(rig: Rig, *instances: str, span_ms: int) -> None:
    """A broker announces itself every 500 ms for a while."""
    for _ in range(span_ms // 500):
        rig.tell(presence(*instances))
        rig.run(500)


def moved(rig: Rig) -> list[str]:
    return [body.sequence for body in rig.published(MigrationFinished) if body.outcome is MigrationOutcome.MOVED]


# who acts


def test_nothing_is_handed_off_while_a_broker_acts_for_the_instance():
    rig = Rig("a", "b")
    rig.workers["b"].blocks_free = 2_000
    rig.tell(presence("a"))
    rig.plan(a=InstanceRole.PREFILL, b=InstanceRole.DECODE)
    rig.decode("a")
    speak(rig, "a", span_ms=5_000)
    assert moved(rig) == []


def test_handoffs_begin_when_the_broker_falls_silent_and_end_when_it_is_back():
    rig = Rig("a", "b")
    rig.workers["b"].blocks_free = 2_000  # sequences grow meanwhile
    rig.tell(presence("a"))
    rig.plan(a=InstanceRole.PREFILL, b=InstanceRole.DECODE)
    rig.decode("a")
    speak(rig, "a", span_ms=2_000)
    assert moved(rig) == []
    rig.run(4_000)
    assert moved(rig) == ["r.0"]
    speak(rig, "a", span_ms=1_000)
    rig.decode("a", "q.0")
    speak(rig, "a", span_ms=3_000)
    assert moved(rig) == ["r.0"]


def test_a_broker_of_another_instance_changes_nothing_here():
    rig = Rig("a", "b")
    rig.workers["b"].blocks_free = 2_000
    rig.tell(presence("b"))
    rig.plan(a=InstanceRole.PREFILL, b=InstanceRole.DECODE)
    rig.decode("a")
    speak(rig, "b", span_ms=3_000)
    assert moved(rig) == ["r.0"]


@pytest.mark.parametrize("state", [PresenceState.LEAVING, PresenceState.DEAD])
def test_a_broker_that_leaves_or_died_is_replaced_at_once(state: PresenceState):
    rig = Rig("a", "b")
    speak(rig, "a", span_ms=500)
    rig.tell(presence(state=state))
    rig.decode("a")
    rig.ask("a", EvacuateInstance(limit_ms=5_000), "evacuate")
    rig.run(1_200)
    assert moved(rig) == ["r.0"]


def test_an_evacuation_is_the_brokers_to_carry_out_and_answered_here():
    rig = Rig("a", "b")
    rig.workers["b"].blocks_free = 2_000
    speak(rig, "a", span_ms=500)
    rig.decode("a", "r.0")
    rig.decode("a", "r.1")
    rig.ask("a", EvacuateInstance(limit_ms=20_000), "evacuate")
    speak(rig, "a", span_ms=1_000)
    assert moved(rig) == []
    assert not any(isinstance(body, InstanceEvacuated) for body in rig.answers)
    for sequence in ("r.0", "r.1"):
        order = MigrateSequence(
            sequence=sequence, target="b", reason=MigrationReason.DRAIN, order=f"deal of {sequence}"
        )
        rig.ask("a", order)
        speak(rig, "a", span_ms=1_000)
    (answer,) = [body for body in rig.answers if isinstance(body, InstanceEvacuated)]
    assert (answer.moved, answer.failed, answer.left) == (2, 0, 0)


def test_the_broker_is_told_of_an_evacuation_until_it_is_over():
    rig = Rig("a", "b")
    rig.workers["b"].blocks_free = 2_000
    speak(rig, "a", span_ms=500)
    rig.decode("a")
    rig.ask("a", EvacuateInstance(limit_ms=20_000), "evacuate")
    speak(rig, "a", span_ms=1_000)
    rig.ask("a", MigrateSequence(sequence="r.0", target="b", reason=MigrationReason.DRAIN, order="deal-1"))
    speak(rig, "a", span_ms=2_000)
    told = rig.published(EvacuationAnnounced)
    assert {body.instance for body in told} == {"a"}
    assert [body.left_ms for body in told[:2]] == [20_000, 19_500]
    assert (told[-1].left_ms, sum(not body.left_ms for body in told)) == (0, 1)


def test_an_evacuation_without_a_broker_is_announced_to_nobody():
    rig = Rig("a", "b")
    rig.decode("a")
    rig.ask("a", EvacuateInstance(limit_ms=5_000), "evacuate")
    rig.run(3_000)
    assert moved(rig) == ["r.0"]
    assert rig.published(EvacuationAnnounced) == []


def test_an_evacuation_is_carried_out_here_where_the_broker_orders_nothing():
    rig = Rig("a", "b")
    rig.workers["b"].blocks_free = 2_000
    speak(rig, "a", span_ms=500)
    for index in range(8):
        rig.decode("a", f"r.{index}")
    rig.ask("a", EvacuateInstance(limit_ms=20_000), "evacuate")
    speak(rig, "a", span_ms=1_500)
    assert moved(rig) == []
    speak(rig, "a", span_ms=2_500)
    assert len(moved(rig)) == 8, "its own moves do not make it wait for the broker again"


def test_an_evacuation_goes_on_here_where_the_broker_falls_silent():
    rig = Rig("a", "b")
    rig.workers["b"].blocks_free = 2_000
    speak(rig, "a", span_ms=500)
    rig.decode("a")
    rig.ask("a", EvacuateInstance(limit_ms=20_000), "evacuate")
    rig.run(1_000)
    assert moved(rig) == []
    rig.run(2_000)
    assert moved(rig) == ["r.0"]


def test_silence_during_our_own_outage_is_not_the_brokers():
    delegation = Delegation(silence_ns=SILENCE_NS)
    delegation.on_presence(presence("a"), {"a"}, 0)
    assert delegation.broker_of("a", SILENCE_NS - 1) == "b0"
    assert delegation.broker_of("a", SILENCE_NS) is None
    delegation.restart_timers(10 * SILENCE_NS)
    assert delegation.broker_of("a", 11 * SILENCE_NS - 1) == "b0"
    rig = Rig("a")
    rig.deliver("a", Message(BusReconnected()))


def test_an_instance_that_a_broker_names_no_longer_has_none():
    delegation = Delegation(silence_ns=SILENCE_NS)
    delegation.on_presence(presence("a", "b"), {"a", "b"}, 0)
    delegation.on_presence(presence("b"), {"a", "b"}, 1)
    assert (delegation.broker_of("a", 1), delegation.broker_of("b", 1)) == (None, "b0")


def test_another_broker_takes_an_instance_over():
    delegation = Delegation(silence_ns=SILENCE_NS)
    delegation.on_presence(presence("a"), {"a"}, 0)
    delegation.on_presence(presence("a", name="b1"), {"a"}, 1)
    delegation.on_presence(presence(state=PresenceState.DEAD), {"a"}, 2)
    assert delegation.broker_of("a", 2) == "b1"


def test_late_words_of_an_earlier_broker_process_and_other_roles_count_for_nothing():
    delegation = Delegation(silence_ns=SILENCE_NS)
    delegation.on_presence(presence("a", incarnation=2), {"a"}, 0)
    delegation.on_presence(presence(state=PresenceState.LEAVING, incarnation=1), {"a"}, 1)
    assert delegation.broker_of("a", 1) == "b0"
    worker = ServicePresence(role="worker", name="w", incarnation=1, at_ns=0, instances=["c"])
    delegation.on_presence(worker, {"c"}, 1)
    assert delegation.broker_of("c", 1) is None


# orders


def test_an_order_with_an_open_target_is_executed_while_a_broker_acts():
    rig = Rig("a", "b")
    speak(rig, "a", span_ms=500)
    rig.decode("a")
    finished = rig.migrate(order="deal-1")
    assert (finished.outcome, finished.target, finished.orders) == (MigrationOutcome.MOVED, "b", ["deal-1"])


def test_the_publication_names_the_orders_of_all_who_asked():
    rig = Rig("a", "b")
    rig.decode("a")
    for order in ("deal-1", "deal-2", "deal-1"):
        rig.ask("a", MigrateSequence(sequence="r.0", target="b", order=order))
    rig.run(2_000)
    (finished,) = rig.published(MigrationFinished)[:1]
    assert finished.orders == ["deal-1", "deal-2"]


def test_a_refusal_is_published_with_its_order():
    rig = Rig("a", "b")
    finished = rig.migrate(target="nowhere", order="deal-1")
    assert finished.refusal is KvRefusal.NO_TARGET
    published = [body for sender, body in rig.said if isinstance(body, MigrationFinished) and sender == "a"]
    assert [body.orders for body in published] == [["deal-1"], ["deal-1"]], "publication and answer"


def test_an_order_that_is_done_is_answered_again_and_moves_nothing():
    rig = Rig("a", "b")
    rig.decode("a")
    first = rig.migrate(target="b", order="deal-1")
    words = len(rig.words())
    again = rig.migrate(target="b", order="deal-1")
    assert (again.migration, again.outcome, again.epoch) == (first.migration, first.outcome, first.epoch)
    assert [word for word in rig.words()[words:] if word != "MigrationFinished"] == []


def test_an_order_without_a_name_is_tried_again():
    rig = Rig("a", "b")
    rig.workers["a"].refuse = {}
    assert rig.migrate(target="b", within_ms=0).migration != rig.migrate(target="b", within_ms=0).migration


def test_the_number_of_askers_of_one_migration_is_bounded():
    rig = Rig("a", "b")
    rig.decode("a")
    for index in range(ASKERS_MAX + 2):
        rig.ask("a", MigrateSequence(sequence="r.0", target="b", order=f"deal-{index}"))
    rig.run(3_000)
    refusals = [body for body in rig.answers if isinstance(body, MigrationFinished) and body.refusal is not None]
    assert {body.refusal for body in refusals} == {KvRefusal.TOO_MANY}
    assert sorted(order for body in refusals for order in body.orders) == [
        f"deal-{ASKERS_MAX}",
        f"deal-{ASKERS_MAX + 1}",
    ]


def test_remembered_orders_are_bounded_and_small():
    orders = FinishedOrders(orders_max=3)
    assert ORDERS_MAX >= 3
    for index in range(5):
        ended = MigrationFinished(
            migration="g",
            sequence="r.0",
            model="m",
            source="a",
            target="b",
            outcome=MigrationOutcome.MOVED,
            reason=MigrationReason.SCHEDULER,
            epoch=1,
            block_size=16,
            block_hashes=b"x" * 800,
            orders=[f"deal-{index}"],
        )
        orders.keep(ended)
    assert orders.find("r.0", "deal-1") is None
    kept = orders.find("r.0", "deal-4")
    assert kept is not None
    assert kept.block_hashes == b""
    assert orders.find("q.0", "deal-4") is None
    assert orders.find("r.0", "") is None


# what leaves


def running(name: str, blocks: int, **changes: object) -> SequenceStatus:
    fields = {"state": SequenceState.RUNNING, "output_tokens": 1, "immovable": ""} | changes
    return SequenceStatus(
        sequence=name,
        state=fields["state"],  # type: ignore[arg-type]
        prompt_tokens=10,
        computed_tokens=10,
        output_tokens=fields["output_tokens"],  # type: ignore[arg-type]
        max_tokens=100,
        blocks=blocks,
        arrival_ns=0,
        immovable=fields["immovable"],  # type: ignore[arg-type]
    )


def test_an_instance_that_shall_be_empty_lets_the_longest_rest_go_first() -> None:
    def ends_after(name: str, rest: int) -> SequenceStatus:
        return msgspec.structs.replace(running(name, 4), output_tokens=10, expected_output_tokens=10 + rest)

    order = longest_rest_first([ends_after("soon", 3), ends_after("late", 60), ends_after("later", 61)])
    assert [status.sequence for status in order] == ["later", "late", "soon"]


@pytest.mark.parametrize(
    ("sequences", "rooms", "count", "chosen"),
    [
        ([], (9,), 3, []),
        ([running("a", 4)], (), 3, []),
        ([running("a", 4)], (9,), 0, []),
        ([running("a", 4), running("b", 4)], (9,), 1, ["a"]),
        ([running("a", 10), running("b", 9)], (9,), 3, ["b"]),
        ([running("a", 4), running("b", 4)], (9,), 3, ["a"]),  # 9 - 4 - 2 of growth leaves 3
        ([running("a", 4), running("b", 4)], (9, 4), 3, ["a", "b"]),
        ([running("a", 4, state=SequenceState.WAITING), running("b", 4)], (9,), 3, ["b"]),
        ([running("a", 4, output_tokens=0), running("b", 4, immovable="mm")], (9,), 3, []),
        ([running("barred", 4), running("b", 4)], (9,), 3, ["b"]),
        ([running("a", 0)], (-3, -1), 3, []),
    ],
)
def test_the_first_that_find_room_side_by_side_leave(
    sequences: list[SequenceStatus], rooms: tuple[int, ...], count: int, chosen: list[str]
):
    question = LeavingQuestion(sequences=tuple(sequences), barred={"barred"}, rooms=rooms, growth_blocks=2, count=count)
    assert [status.sequence for status in leaving(question)] == chosen
