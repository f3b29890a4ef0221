"""The predictor knows what an instance has in its prefix cache: from decisions, snapshots and outcomes."""

from typing import Any

import pytest
from millrace.contracts.migration import MigrationFinished, MigrationOutcome
from millrace.contracts.observers import RequestFinished
from millrace.contracts.predictor import LatencyPrediction, PredictLatency
from millrace.contracts.status import SequenceState
from millrace.kvcache.chain import extend_chain, pack_hashes

from services.predictor.prefixes import FOLLOWED_MAX, FOLLOWED_NS
from tests.testbed.messages import plain
from tests.unit.predictor_rig import (
    MS,
    START_NS,
    Predictor,
    decision,
    outcome,
    question,
    record,
    served,
    snapshot,
    status,
)

BLOCK = 16
PROMPT = list(range(1_000, 1_100))  # six full blocks and four tokens
ANSWER = list(range(5_000, 5_060))


def named(tokens: list[int]) -> dict[str, Any]:
    hashes: list[int] = []
    extend_chain(hashes, tokens, BLOCK)
    return {"prompt_tokens": len(tokens), "block_size": BLOCK, "block_hashes": pack_hashes(hashes)}


def asking(tokens: list[int], **changes: Any) -> PredictLatency:
    return question(**named(tokens) | changes)


def cached(predictor: Predictor, tokens: list[int], **changes: Any) -> int:
    answer = predictor.ask(asking(tokens, **changes))
    assert isinstance(answer, LatencyPrediction), answer
    return answer.cached_tokens


def finished(request: str, **changes: Any) -> RequestFinished:
    return outcome(request, **{"ttft_ns": MS, "prompt_tokens": len(PROMPT), "predicted_cached_tokens": 0} | changes)


def with_prompt(**changes: Any) -> Predictor:
    predictor = served()
    predictor.send(decision("a", "w0", **named(PROMPT)))
    predictor.send(finished("a", **changes))
    return predictor


def test_a_prompt_that_an_instance_has_had_is_cached_there_but_for_its_last_token() -> None:
    predictor = with_prompt()
    assert cached(predictor, PROMPT) == 96
    assert cached(predictor, PROMPT[:96]) == 80, "one token is always computed"
    assert cached(predictor, [*PROMPT[:40], 7, 8, 9]) == 32
    assert cached(predictor, [7, *PROMPT]) == 0
    assert cached(predictor, PROMPT, block_size=32) == 0, "hashes of other blocks"
    assert predictor.ask(question(prompt_tokens=100)).cached_tokens == 0, "nobody named its blocks"


def test_a_prompt_on_its_way_is_a_hit_for_those_who_come_after_it_only() -> None:
    predictor = served()
    assert cached(predictor, PROMPT) == 0
    predictor.send(decision("a", "w0", **named(PROMPT)))
    assert cached(predictor, PROMPT) == 96, "by the time the next one is let in, it is computed"


def test_where_prompts_are_computed_side_by_side_one_on_its_way_is_no_hit_before_it_is_computed() -> None:
    predictor = Predictor()
    predictor.register(record(long_prefill_token_threshold=32))
    predictor.send(snapshot())
    predictor.send(decision("a", "w0", **named(PROMPT)))
    assert cached(predictor, PROMPT) == 0
    running = status("a.0", prompt_tokens=100, computed_tokens=64, blocks=4)
    predictor.send(snapshot(step=2, at_ns=START_NS + MS, running=[running], blocks_free=508))
    assert cached(predictor, PROMPT) == 64


def test_a_waiting_sequence_counts_with_its_hits() -> None:
    long = list(range(600))
    predictor = served()
    predictor.send(decision("a", "w0", **named(long)))
    predictor.send(finished("a", prompt_tokens=600))
    predictor.send(decision("b", "w0", **named(long)))
    waiting = {"state": SequenceState.WAITING, "prompt_tokens": 600, "computed_tokens": 0, "blocks": 0}
    predictor.send(snapshot(step=2, at_ns=START_NS + MS, waiting=[status("b.0", **waiting)]))
    known = predictor.ask(question(prompt_tokens=32))
    predictor.send(snapshot(step=3, at_ns=START_NS + MS, waiting=[status("x.0", **waiting)]))
    stranger = predictor.ask(question(prompt_tokens=32))
    assert (stranger.ttft_ns, known.ttft_ns) == (30 * MS, 20 * MS)


def test_what_was_decoded_is_cached_too_for_the_next_turn_of_a_conversation() -> None:
    whole, hashes = PROMPT + ANSWER, []
    extend_chain(hashes, whole[:-1], BLOCK)
    predictor = with_prompt(block_hashes=pack_hashes(hashes[6:]))
    assert cached(predictor, [*whole, 1, 2, 3]) == 144


def moved(request: str, tokens: list[int], *, to: str = "w0", **changes: Any) -> MigrationFinished:
    """From one of w0 and w1 to the other, with all full blocks of these tokens."""
    blocks = {name: value for name, value in named(tokens).items() if name != "prompt_tokens"}
    way = {"sequence": f"{request}.0", "source": "w1" if to == "w0" else "w0", "target": to}
    return plain(MigrationFinished, **way | blocks | changes)


def test_what_moved_here_is_cached_here_from_then_on() -> None:
    predictor = served()
    predictor.send(decision("a", "elsewhere", **named(PROMPT)))
    assert cached(predictor, PROMPT) == 0
    predictor.send(moved("a", PROMPT + ANSWER[:20]))
    assert cached(predictor, PROMPT) == 96
    assert cached(predictor, PROMPT + ANSWER) == 112, "and what it had decoded before"


def test_what_moved_away_is_left_here_and_what_it_decodes_there_is_not() -> None:
    whole, hashes = PROMPT + ANSWER, []
    extend_chain(hashes, whole[:-1], BLOCK)
    predictor = served()
    predictor.send(decision("a", "w0", **named(PROMPT)))
    running = status("a.0", prompt_tokens=100, computed_tokens=100, blocks=7)
    predictor.send(snapshot(step=2, at_ns=START_NS + MS, running=[running], blocks_free=505))
    predictor.ask(asking(PROMPT))
    predictor.send(moved("a", whole[:120], to="w1"))
    predictor.send(finished("a", migrations=1, instances=["w0", "w1"], block_hashes=pack_hashes(hashes[6:])))
    assert cached(predictor, [*whole, 1]) == 112


@pytest.mark.parametrize(
    "changes",
    [
        {"outcome": MigrationOutcome.ABORTED},
        {"outcome": MigrationOutcome.LOST},
        {"target": "w9"},
        {"block_size": 32},
        {"block_hashes": b"broken"},
        {"block_size": 0, "block_hashes": b""},
    ],
)
def test_a_move_that_came_to_nothing_or_names_nothing_of_this_engine_changes_nothing(changes: dict[str, Any]) -> None:
    predictor = served()
    predictor.send(moved("a", PROMPT, **changes))
    assert cached(predictor, PROMPT) == 0


def test_a_sequence_that_ended_unheard_leaves_its_blocks_when_snapshots_show_it_no_more() -> None:
    predictor = served()
    predictor.send(decision("a", "w0", **named(PROMPT)))
    running = status("a.0", prompt_tokens=100, computed_tokens=100, blocks=7)
    predictor.send(snapshot(step=2, at_ns=START_NS + MS, running=[running], blocks_free=505))
    assert cached(predictor, PROMPT) == 96
    predictor.send(snapshot(step=3, at_ns=START_NS + 2 * MS, blocks_free=4))
    assert cached(predictor, PROMPT) == 64, "four blocks are free, and no more can hold what was left"


def test_a_placement_that_came_to_nothing_leaves_nothing() -> None:
    predictor = served()
    predictor.send(decision("a", "w0", **named(PROMPT)))
    predictor.send(decision("a", "w1", **named(PROMPT)))
    assert cached(predictor, PROMPT) == 0
    predictor.send(decision("b", "w0", **named(PROMPT)))
    predictor.send(outcome("b", outcome="cancelled", ttft_ns=None))
    assert cached(predictor, PROMPT) == 0
    predictor.send(decision("c", "w0", **named(PROMPT)))
    late = START_NS + FOLLOWED_NS + 2 * MS
    predictor.now_ns = late
    predictor.send(snapshot(step=2, at_ns=late))
    predictor.ask()
    assert cached(predictor, PROMPT) == 0, "nobody ever showed it"


def test_an_outcome_with_fewer_cached_tokens_takes_the_missing_ones_back() -> None:
    predictor = with_prompt()
    other = list(range(5_000, 5_040))
    predictor.send(decision("b", "w0", **named(other)))
    predictor.send(finished("b", prompt_tokens=40))
    predictor.send(decision("c", "w0", **named([*other, 1])))
    predictor.send(finished("c", prompt_tokens=41, cached_tokens=0, predicted_cached_tokens=32))
    assert cached(predictor, PROMPT) == 0, "it was left before what was missing"
    assert cached(predictor, other) == 32, "computed anew"
    assert predictor.metrics.prefix_tokens.plain() == {"believed": 32, "found": 0, "missing": 32, "unexpected": 0}


def test_an_engine_that_never_finds_anything_is_not_believed_until_it_does() -> None:
    predictor = with_prompt()
    for number in range(8):
        predictor.send(decision(f"r{number}", "w0", **named(PROMPT)))
        predictor.send(finished(f"r{number}", cached_tokens=0, predicted_cached_tokens=96))
    assert cached(predictor, PROMPT) == 0
    for number in range(8, 16):
        predictor.send(decision(f"r{number}", "w0", **named(PROMPT)))
        predictor.send(finished(f"r{number}", cached_tokens=96))
    assert cached(predictor, PROMPT) == 96


@pytest.mark.parametrize("changes", [{"incarnation": 6}, {"prefix_caching": False}])
def test_an_instance_that_restarts_or_caches_nothing_has_nothing(changes: dict[str, Any]) -> None:
    predictor = with_prompt()
    predictor.register(record(**changes))
    predictor.send(snapshot(incarnation=changes.get("incarnation", 5), step=1, at_ns=START_NS + MS))
    assert cached(predictor, PROMPT) == 0


def test_no_more_sequences_are_followed_than_an_instance_can_have() -> None:
    predictor = served()
    (prefixes,) = [each.prefixes for each in predictor.actor._instances.values()]
    for number in range(FOLLOWED_MAX + 10):
        prefixes.place(f"s{number}", decision("r", "w0", **named(PROMPT)), at_ns=START_NS)
    prefixes.check_invariants()
    assert len(prefixes._followed) == FOLLOWED_MAX
    assert prefixes.place("broken", decision("r", "w0", block_size=16, block_hashes=b"1234567"), at_ns=0) == 0
