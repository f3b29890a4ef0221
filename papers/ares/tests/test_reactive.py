"""Rescheduling by present loads, by table."""

import msgspec
from millrace.policies.trading import LoadView, TriggerView

from papers import PAPERS
from tests.unit.trading_views import bid, load, pick, sequence, trigger, unequal

REACTIVE = f"{PAPERS}/ares/reactive.py"


def test_reactive_offers_what_levels_the_present_loads_best_and_asks_nothing_about_the_rest():
    view = unequal()
    assert trigger(REACTIVE, view)[0].offers == ("r.1",)  # 3,000 of 8,000 too many; 9,000 would turn them round
    known = tuple(msgspec.structs.replace(each, rest_p50=1) for each in view.sequences)
    assert trigger(REACTIVE, msgspec.structs.replace(view, sequences=known))[0].offers == ("r.1",)


def test_reactive_offers_below_its_threshold_where_memory_is_nearly_full():
    full = LoadView(name="a", tokens=2_050, blocks_free=10, blocks_total=2_000)
    view = TriggerView(own=full, peers=(load("b", 2_000),), sequences=(sequence("r.0", 20), sequence("r.1", 900)))
    assert trigger(REACTIVE, view)[0].offers == ("r.0",)
    assert trigger(REACTIVE, msgspec.structs.replace(view, own=load("a", 2_050)))[0].offers == ()


def test_reactive_does_not_offer_what_the_lightest_peer_has_no_room_for():
    light = LoadView(name="b", tokens=2_000, blocks_free=100, blocks_total=2_000)
    view = TriggerView(own=load("a", 10_000), peers=(light,), sequences=(sequence("r.0", 500), sequence("r.1", 3_000)))
    assert trigger(REACTIVE, view)[0].offers == ("r.0",)


def test_reactive_moves_to_the_lightest_bidder_where_the_larger_load_falls():
    bids = bid("b", load_tokens=4_000), bid("c", load_tokens=3_000)
    assert pick(REACTIVE, *bids) == "c"
    assert pick(REACTIVE, *bids, moved=sequence("r.0", 8_000)) is None
