"""Balance by CascadeInfer and by Llumnix, by table: what is offered, which bid wins."""

import msgspec
import pytest
from millrace.contracts.broker import MoveReason
from millrace.policies.trading import LoadView, TriggerView

from papers import PAPERS
from tests.unit.trading_views import bid, load, parameters, pick, sequence, trigger, unequal

CASCADE, LLUMNIX = f"{PAPERS}/cascadeinfer/trading.py", f"{PAPERS}/cascadeinfer/llumnix.py"


def test_cascade_offers_at_once_the_longest_that_do_not_exceed_the_excess():
    assert trigger(CASCADE, unequal())[0].offers == ("r.1", "r.0")


def test_cascade_offers_nothing_at_25_percent_above_the_mean_or_less():
    peers = (load("b", 6_000),)
    view = TriggerView(own=load("a", 10_000), peers=peers, sequences=(sequence("r.0", 500),))
    assert trigger(CASCADE, view)[0].offers == ()
    heavier = msgspec.structs.replace(view, own=load("a", 10_001))
    assert trigger(CASCADE, heavier)[0].offers == ("r.0",)


def test_cascade_counts_what_waits_and_what_is_to_come_as_demand():
    view = TriggerView(
        own=load("a", 1_000, waiting_tokens=6_000, queued_tokens=3_000),
        peers=(load("b", 2_000),),
        sequences=(sequence("r.0", 500),),
    )
    assert trigger(CASCADE, view)[0].offers == ("r.0",)


@pytest.mark.parametrize(
    ("bids", "chosen"),
    [
        # Half of one is that one; of two the lighter one; of three the two lighter ones.
        ([("b", 900)], "b"),
        ([("b", 900), ("c", 100)], "c"),
        # Of those, the first to answer.
        ([("b", 900), ("c", 100), ("d", 500)], "c"),
        ([("b", 900), ("c", 500), ("d", 100)], "c"),
        ([("b", 1), ("c", 2), ("d", 3), ("e", 9), ("f", 9), ("g", 9)], "b"),
    ],
)
def test_cascade_drops_the_loaded_half_and_takes_the_first_to_answer(bids, chosen):
    views = [bid(name, load_tokens=tokens) for name, tokens in bids]
    assert pick(CASCADE, *views) == chosen


def short_of_memory(**fields) -> TriggerView:
    """One instance with 2 idle blocks per sequence beside a rich one and one that is poorer still."""
    own = LoadView(name="a", tokens=30_000, running=10, blocks_free=20, blocks_total=2_000)
    poorer = LoadView(name="b", tokens=30_000, running=10, blocks_free=5, blocks_total=2_000)
    rich = [LoadView(name=name, tokens=8_000, running=10, blocks_free=1_500, blocks_total=2_000) for name in ("c", "d")]
    sequences = (sequence("r.0", 900), sequence("r.1", 300))
    return TriggerView(own=own, peers=(poorer, *rich[: fields.pop("rich", 2)]), sequences=sequences)


def test_llumnix_offers_its_shortest_sequence_to_the_target_of_its_rank():
    answer, _ = trigger(LLUMNIX, short_of_memory())
    assert answer.offers == ("r.1",)
    assert "at c" in answer.reason or "at d" in answer.reason
    # The only rich instance is for the poorer one.
    assert trigger(LLUMNIX, short_of_memory(rich=1))[0].offers == ()


def test_llumnix_moves_nothing_above_its_threshold_or_where_the_gap_would_turn_round():
    level = TriggerView(
        own=LoadView(name="a", tokens=30_000, running=2, blocks_free=4, blocks_total=2_000),
        peers=(LoadView(name="b", tokens=30_000, running=2, blocks_free=7, blocks_total=2_000),),
        sequences=(sequence("r.0", 800),),
    )
    assert trigger(LLUMNIX, level)[0].offers == ()
    assert trigger(LLUMNIX, short_of_memory(), freeness=1.5)[0].offers == ()


def test_llumnix_takes_the_bid_with_most_idle_memory_if_that_is_more_than_here():
    poor = load("a", 10_000)
    assert pick(LLUMNIX, bid("b", blocks_idle=1_100), bid("c", blocks_idle=1_200), own=poor) == "c"
    assert pick(LLUMNIX, bid("b", blocks_idle=900), own=poor) is None
    assert pick(LLUMNIX, bid("b", blocks_idle=900), own=poor, reason=MoveReason.DRAIN) == "b"


@pytest.mark.parametrize("fields", [{"excess": -0.1}, {"excess": float("nan")}, {"offers_max": 0}])
def test_a_parameter_that_makes_no_sense_is_refused_by_name(fields):
    with pytest.raises(msgspec.ValidationError, match=next(iter(fields))):
        parameters(CASCADE, **fields)
