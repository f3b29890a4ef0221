"""Dispatch policies by table: what each prefers, its ties, its stated cases, and that it changes nothing."""

from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace.policies.dispatch import DISPATCH_POLICIES, DispatchView, InstanceView
from millrace.policies.dispatch.pick import SCORES_MAX

SECOND = 1_000_000_000
NAMES = sorted(DISPATCH_POLICIES)


def seen(name: str, **fields: int) -> InstanceView:
    return InstanceView(name=name, known=True, total_tokens=16_000, **fields)


def view(*candidates: InstanceView, sequences: int = 1) -> DispatchView:
    return DispatchView(model="m", sequences=sequences, length_tokens=10, candidates=candidates)


def decide(name: str, asked: DispatchView, *, state=None, now_ns: int = 0, seed: int = 1, **parameters):
    policy = DISPATCH_POLICIES[name]
    given_parameters = msgspec.convert(parameters, policy.parameters)
    before = policy.initial_state if state is None else state
    return policy.decide(asked, given_parameters, before, now_ns, Random(seed))


@pytest.mark.parametrize(
    ("policy", "candidates", "chosen"),
    [
        # Memory per running sequence: 100 against 150.
        ("infaas", [seen("a", used_tokens=400, running=4), seen("b", used_tokens=300, running=2)], "a"),
        # An idle instance has nothing in use; a batch of nothing counts as one.
        ("infaas", [seen("a", used_tokens=400, running=4), seen("b")], "b"),
        # What is in flight counts in memory and in the batch: (0 + 300) / 1 against 100.
        (
            "infaas",
            [seen("a", used_tokens=400, running=4), seen("b", in_flight_tokens=300, in_flight_sequences=1)],
            "a",
        ),
        # The queue does not count for INFaaS++, but for Llumnix: (400 + 800) / 4 = 300 against 150.
        (
            "infaas",
            [
                seen("a", used_tokens=400, running=4, waiting_prefill_tokens=800),
                seen("b", used_tokens=300, running=2),
            ],
            "a",
        ),
        (
            "llumnix",
            [
                seen("a", used_tokens=400, running=4, waiting_prefill_tokens=800),
                seen("b", used_tokens=300, running=2),
            ],
            "b",
        ),
        # In flight stands in Llumnix's queue: (300 + 200) / 2 = 250 against 240.
        (
            "llumnix",
            [
                seen("a", used_tokens=300, running=2, in_flight_tokens=200, in_flight_sequences=5),
                seen("b", used_tokens=240, running=1),
            ],
            "b",
        ),
        # Tokens, not requests: one long prompt outweighs three short ones.
        (
            "join_shortest_queue",
            [
                seen("a", waiting=1, waiting_prefill_tokens=8000),
                seen("b", waiting=3, waiting_prefill_tokens=30),
            ],
            "b",
        ),
        # A running token weighs a quarter of a waiting one by default: 250 against 251.
        (
            "join_shortest_queue",
            [seen("a", running=2, running_tokens=1000), seen("b", waiting_prefill_tokens=251)],
            "a",
        ),
        # Without a summary only what is in flight is known.
        (
            "join_shortest_queue",
            [InstanceView(name="a", in_flight_tokens=50, in_flight_sequences=1), seen("b", waiting_prefill_tokens=40)],
            "b",
        ),
        ("llumnix", [InstanceView(name="a"), seen("b", used_tokens=10, running=1)], "a"),
    ],
)
def test_a_policy_prefers_the_lower_load(policy, candidates, chosen):
    for seed in range(5):
        assert decide(policy, view(*candidates), seed=seed)[0].chosen == chosen


@pytest.mark.parametrize("policy", NAMES)
def test_without_candidates_nothing_is_chosen_and_the_state_stays(policy):
    decision, state = decide(policy, view())
    assert decision.chosen is None
    assert decision.reason
    assert state == DISPATCH_POLICIES[policy].initial_state


@pytest.mark.parametrize("policy", NAMES)
def test_the_only_candidate_is_chosen(policy):
    decision, _ = decide(policy, view(InstanceView(name="only")))
    assert decision.chosen == "only"
    assert [(s.name, s.score) for s in decision.scores] == [("only", 1.0)]


@pytest.mark.parametrize("policy", ["infaas", "llumnix", "join_shortest_queue", "fewest_requests_per_minute", "random"])
def test_equal_candidates_are_chosen_by_the_rng(policy):
    asked = view(seen("a"), seen("b"), seen("c"))
    chosen = [decide(policy, asked, seed=seed)[0].chosen for seed in range(60)]
    assert set(chosen) == {"a", "b", "c"}
    assert chosen == [decide(policy, asked, seed=seed)[0].chosen for seed in range(60)]


def test_round_robin_takes_turns_and_stays_fair_when_instances_come_and_go():
    state = None
    turns = []
    for names in ("abc", "abc", "abc", "abc", "ac", "abcd", "abcd", "abcd"):
        decision, state = decide("round_robin", view(*(InstanceView(name=n) for n in names)), state=state)
        turns.append(decision.chosen)
    assert turns == ["a", "b", "c", "a", "c", "d", "a", "b"]


def test_fewest_requests_per_minute_counts_sequences_of_a_sliding_window():
    asked = view(InstanceView(name="a"), InstanceView(name="b"))
    first, state = decide("fewest_requests_per_minute", view(InstanceView(name="a"), sequences=3), now_ns=0)
    assert first.chosen == "a"
    for second in (1, 2, 3):
        decision, state = decide("fewest_requests_per_minute", asked, state=state, now_ns=second * SECOND)
        assert decision.chosen == "b"
    assert state.totals == {"a": 3, "b": 3}
    # At 60 s a's three have left the window, b's have not.
    decision, state = decide("fewest_requests_per_minute", asked, state=state, now_ns=60 * SECOND)
    assert decision.chosen == "a"
    # At 61 s b's first has left too: 2 against 1.
    decision, state = decide("fewest_requests_per_minute", asked, state=state, now_ns=61 * SECOND)
    assert state.totals == {"a": 2, "b": 2}


def test_the_window_of_fewest_requests_is_a_parameter():
    asked = view(InstanceView(name="a"), InstanceView(name="b"))
    _, state = decide("fewest_requests_per_minute", view(InstanceView(name="a")), now_ns=0, window_s=2)
    decision, state = decide("fewest_requests_per_minute", asked, state=state, now_ns=SECOND, window_s=2)
    assert decision.chosen == "b"
    _, state = decide("fewest_requests_per_minute", asked, state=state, now_ns=10 * SECOND, window_s=2)
    assert sum(state.totals.values()) == 1


def test_the_weight_of_running_tokens_is_a_parameter():
    asked = view(seen("a", running_tokens=1000), seen("b", waiting_prefill_tokens=600))
    assert decide("join_shortest_queue", asked, running_weight=0.5)[0].chosen == "a"
    assert decide("join_shortest_queue", asked, running_weight=1.0)[0].chosen == "b"


@pytest.mark.parametrize("policy", NAMES)
def test_an_unknown_parameter_is_refused(policy):
    with pytest.raises(msgspec.ValidationError, match="no_such"):
        msgspec.convert({"no_such": 1}, DISPATCH_POLICIES[policy].parameters)


def test_scores_are_the_best_sixteen_of_many_from_one_downwards():
    asked = view(*(seen(f"i{n:02}", waiting_prefill_tokens=(n * 37) % 64) for n in range(64)))
    decision, _ = decide("join_shortest_queue", asked)
    scores = [s.score for s in decision.scores]
    assert decision.scores[0].name == decision.chosen == "i00"
    assert len(scores) == SCORES_MAX
    assert scores == sorted(scores, reverse=True)
    assert scores[0] == 1.0
    assert scores[-1] == pytest.approx(1 - 15 / 63)


COUNTS = st.integers(0, 5000)
CANDIDATES = st.lists(
    st.builds(
        InstanceView,
        name=st.uuids().map(str),
        known=st.booleans(),
        running=COUNTS,
        waiting=COUNTS,
        running_tokens=COUNTS,
        waiting_prefill_tokens=COUNTS,
        used_tokens=COUNTS,
        in_flight_sequences=COUNTS,
        in_flight_tokens=COUNTS,
    ),
    max_size=40,
    unique_by=lambda c: c.name,
).map(lambda found: sorted(found, key=lambda c: c.name))


@given(candidates=CANDIDATES, policy=st.sampled_from(NAMES), seed=st.integers(0, 99), now_s=st.integers(0, 300))
def test_every_decision_names_a_candidate_with_scores_in_bounds_and_repeats(candidates, policy, seed, now_s):
    asked = view(*candidates)
    state = None
    for step in range(3):
        now_ns = (now_s + step) * SECOND
        frozen = msgspec.json.encode(asked)
        decision, after = decide(policy, asked, state=state, now_ns=now_ns, seed=seed)
        again, after_again = decide(policy, asked, state=state, now_ns=now_ns, seed=seed)
        assert (decision, after) == (again, after_again)
        assert msgspec.json.encode(asked) == frozen
        assert decision.reason
        if not candidates:
            assert decision.chosen is None
            return
        names = {c.name for c in candidates}
        assert decision.chosen in names
        assert len(decision.scores) <= SCORES_MAX
        assert {s.name for s in decision.scores} <= names
        assert all(0.0 <= s.score <= 1.0 for s in decision.scores)
        assert {s.name: s.score for s in decision.scores}[decision.chosen] == 1.0
        state = after
