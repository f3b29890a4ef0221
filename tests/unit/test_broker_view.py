"""A broker's view of large stages: a part is looked at, another one each second, and who has room is found."""

from millrace.contracts.broker import LoadReported, MoveReason
from millrace.contracts.local import KeyChanged

from services.broker.cluster_view import LOOKED_AT, BrokerView, sampled
from tests.testbed.messages import plain
from tests.unit.broker_rig import MODEL, MS, START_NS, FakeInstance, plan

SECOND_NS = 1_000 * MS


def view_of(lower: list[str], upper: list[str], *, with_room: set[str]) -> BrokerView:
    """Two stages whose instances were all heard just now; most are full."""
    view = BrokerView(load_age_ns=10 * SECOND_NS)
    names = [*lower, *upper]
    for name in names:
        view.on_record(KeyChanged(bucket="instance", key=name, value=FakeInstance(name).record(), revision=1), START_NS)
    view.on_plan(KeyChanged(bucket="plan", key=MODEL, value=plan((0, lower), (1_000, upper)), revision=1))
    for name in names:
        blocks = {"blocks_free": 1_000 if name in with_room else 0, "blocks_total": 2_000}
        stage = "s0" if name in lower else "s1"
        assert view.on_load(plain(LoadReported, instance=name, stage=stage, at_ns=START_NS, **blocks), START_NS)
    return view


def test_the_parts_of_a_set_are_the_set_and_small_sets_are_whole() -> None:
    names = [f"w{number}" for number in range(3 * LOOKED_AT + 5)]
    for now_ns in (0, SECOND_NS, 7 * SECOND_NS):
        parts = list(sampled(names, "w0", now_ns))
        assert sorted(name for part in parts for name in part) == sorted(names)
        assert max(map(len, parts)) <= LOOKED_AT
    assert list(sampled(names[:LOOKED_AT], "w0", 0)) == [names[:LOOKED_AT]]
    assert list(sampled([], "w0", 0)) == [[]]


def test_of_a_large_stage_some_peers_are_looked_at_and_others_a_second_later() -> None:
    lower = [f"w{number:03}" for number in range(4 * LOOKED_AT)]
    view = view_of(lower, ["u0"], with_room=set(lower))
    first, later = ({load.name for load in view.peers("w000", START_NS + k * SECOND_NS)} for k in (0, 1))
    assert LOOKED_AT - 1 <= len(first) <= LOOKED_AT
    assert not first & later
    few = view_of(lower[:3], ["u0"], with_room=set())
    assert {load.name for load in few.peers("w000", START_NS)} == {"w001", "w002"}


def test_the_only_one_of_a_large_stage_that_has_room_is_found() -> None:
    upper = [f"u{number:03}" for number in range(5 * LOOKED_AT)]
    for roomy in ("u000", "u043", "u079"):
        view = view_of(["w0"], upper, with_room={roomy})
        found = view.targets("w0", MoveReason.BOUNDARY, 2_000, START_NS, blocks=10)
        assert roomy in {load.name for load in found}
        assert len(found) <= LOOKED_AT
