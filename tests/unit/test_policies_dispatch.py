"""Dispatch policies by table: what each prefers, its ties, its stated cases, and that it changes nothing."""

from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace.policies.dispatch import DISPATCH_POLICIES, DispatchView, InstanceView, Prediction
from millrace.policies.dispatch.asking import UNPREDICTED, draw
from millrace.policies.dispatch.pick import SCORES_MAX
from millrace.policies.dispatch.view import named_views

SECOND = 1_000_000_000
NAMES = DISPATCH_POLICIES.names
MS = 1_000_000


def seen(name: str, **fields: int) -> InstanceView:
    return InstanceView(name=name, known=True, total_tokens=16_000, **fields)


def view(*candidates: InstanceView, sequences: int = 1) -> DispatchView:
    return DispatchView(model="m", sequences=sequences, length_tokens=10, candidates=candidates)


def predicted(ttft: float, e2e: float, *, others_delay: float = 0.0, since: int = 0) -> Prediction:
    """Times in milliseconds."""
    return Prediction(
        "", ttft_ns=int(ttft * MS), e2e_ns=int(e2e * MS), others_delay_ns=int(others_delay * MS), placed_since=since
    )


def futures(**predictions: Prediction) -> DispatchView:
    """A view of candidates that all have a prediction, of a request whose length was predicted."""
    return msgspec.structs.replace(
        view(*(InstanceView(name=name) for name in sorted(predictions))),
        predictions=predictions,
        expected_output_tokens=100.0,
    )


@given(st.sets(st.text("ab9-", max_size=5), max_size=60), st.lists(st.text("ab9-", max_size=5), max_size=3))
def test_candidates_are_found_by_name_whether_few_are_looked_for_or_many(known: set[str], names: list[str]) -> None:
    candidates = [InstanceView(name=name) for name in sorted(known)]
    assert named_views(candidates, names) == tuple(c for c in candidates if c.name in names)


def decide(name: str, asked: DispatchView, *, state=None, now_ns: int = 0, seed: int = 1, **parameters):
    policy = DISPATCH_POLICIES.load(name)
    given_parameters = msgspec.convert(parameters, policy.parameters)
    before = policy.initial_state if state is None else state
    return policy.decide(asked, given_parameters, before, now_ns, Random(seed))


@pytest.mark.parametrize(
    ("a", "b", "chosen"),
    [
        # Tokens, not requests: one long prompt outweighs three short ones.
        (seen("a", waiting=1, waiting_prefill_tokens=8000), seen("b", waiting=3, waiting_prefill_tokens=30), "b"),
        # A running token weighs a quarter of a waiting one by default: 250 against 251.
        (seen("a", running=2, running_tokens=1000), seen("b", waiting_prefill_tokens=251), "a"),
        # Without a summary only what is in flight is known.
        (InstanceView(name="a", in_flight_tokens=50), seen("b", waiting_prefill_tokens=40), "b"),
        # A batch of small sequences may be full before its tokens are many: newcomers would wait for a place.
        (
            seen("a", running=6, waiting=1, in_flight_sequences=1, sequences_max=8, running_tokens=80),
            seen("b", running=7, sequences_max=8, running_tokens=8_000),
            "b",
        ),
        # Where all are full, the fewest wait.
        (
            seen("a", running=8, waiting=2, sequences_max=8),
            seen("b", running=8, waiting=1, sequences_max=8, running_tokens=8_000),
            "b",
        ),
    ],
)
def test_the_lower_load_is_preferred(a, b, chosen):
    for seed in range(5):
        assert decide("join_shortest_queue", view(a, b), seed=seed)[0].chosen == chosen


@pytest.mark.parametrize("policy", ["join_shortest_queue", "random", "forecast"])
def test_equal_candidates_are_chosen_by_the_rng(policy):
    asked = msgspec.structs.replace(
        view(seen("a"), seen("b"), seen("c")), predictions={name: predicted(1, 10) for name in "abc"}
    )
    chosen = [decide(policy, asked, seed=seed)[0].chosen for seed in range(60)]
    assert set(chosen) == {"a", "b", "c"}
    assert chosen == [decide(policy, asked, seed=seed)[0].chosen for seed in range(60)]


def test_round_robin_takes_turns_and_stays_fair_when_instances_come_and_go():
    state, turns = None, []
    for names in ("abc", "abc", "abc", "abc", "ac", "abcd", "abcd", "abcd"):
        decision, state = decide("round_robin", view(*(InstanceView(name=n) for n in names)), state=state)
        turns.append(decision.chosen)
    assert turns == ["a", "b", "c", "a", "c", "d", "a", "b"]


def test_scores_are_the_best_sixteen_of_many_from_one_downwards():
    asked = view(*(seen(f"i{n:02}", waiting_prefill_tokens=(n * 37) % 64) for n in range(64)))
    decision, _ = decide("join_shortest_queue", asked)
    scores = [s.score for s in decision.scores]
    assert decision.scores[0].name == decision.chosen == "i00"
    assert len(scores) == SCORES_MAX
    assert scores == sorted(scores, reverse=True)
    assert scores[0] == 1.0
    assert scores[-1] == pytest.approx(1 - 15 / 63)


# Forecast.


def forecast(asked: DispatchView, **parameters):
    return decide("forecast", asked, **parameters)[0]


def test_the_forecast_policy_takes_the_least_of_its_metric():
    asked = futures(a=predicted(50, 400), b=predicted(10, 500), c=predicted(90, 300))
    assert forecast(asked, ttft_weight=2).chosen == "c"  # 500, 520, 480
    assert forecast(asked, ttft_weight=20).chosen == "b"  # 1,400, 700, 2,100
    assert forecast(asked, metric="ttft").chosen == "b"
    assert forecast(asked, others_weight=0).reason == "lowest of 3: 700 ms = predicted end to end + 20 x predicted TTFT"
    assert forecast(asked, ttft_weight=0, others_weight=0).reason == "lowest of 3: 300 ms = predicted end to end"
    assert [(s.name, s.score) for s in forecast(asked, ttft_weight=0).scores] == [("c", 1.0), ("a", 0.5), ("b", 0.0)]


def test_the_delay_of_others_counts_by_its_weight():
    asked = futures(a=predicted(1, 100, others_delay=80), b=predicted(1, 130, others_delay=5))
    assert forecast(asked, others_weight=0).chosen == "a", "Block's rule looks at the request alone"
    assert forecast(asked, others_weight=0.3).chosen == "a"
    assert "1 x mean delay of other requests" in forecast(asked, others_weight=1.0).reason
    unknown = forecast(msgspec.structs.replace(asked, expected_output_tokens=None))
    assert unknown.chosen == "a", "where the length is a guess it counts nothing"
    assert "other requests" not in unknown.reason


def test_the_delay_of_others_is_summed_only_where_somebody_would_preempt():
    replace = msgspec.structs.replace
    crowded = replace(predicted(1, 100, others_delay=80), others=40)
    calm = futures(a=crowded, b=replace(predicted(1, 130, others_delay=40), others=2))
    assert forecast(calm).chosen == "a", "2 ms for each of 40 beside 20 ms for each of 2"
    assert forecast(calm, others_summed="always").chosen == "b"
    for short in ("a", "b"):
        asked = futures(**calm.predictions | {short: replace(calm.predictions[short], preemptions=1)})
        decision = forecast(asked)
        assert decision.chosen == "b", "where memory is short every candidate's others count, whoever is short of it"
        assert "2 x delay of other requests" in decision.reason


def test_a_first_token_later_than_nearly_all_counts_six_times():
    asked = futures(a=predicted(50, 8_000), b=predicted(200, 4_000))
    decision, state = decide("forecast", asked)
    assert decision.chosen == "b", "9,000 and 8,000 ms: nothing is late before anything was placed"
    for ttft in Random(1).choices(range(1, 101), k=2_000):
        _, state = decide("forecast", futures(a=predicted(ttft, 500)), state=state)
    assert 90 * MS < state.late_ns < 110 * MS
    decision, _ = decide("forecast", asked, state=state)
    assert (decision.chosen, "+ 100 x TTFT beyond" in decision.reason) == ("a", True), "200 ms is late"


def test_what_was_placed_since_counts_one_first_token_each():
    asked = futures(a=predicted(20, 100, since=2), b=predicted(20, 130))
    assert forecast(asked, ttft_weight=0).chosen == "b"
    assert forecast(futures(a=predicted(20, 100, since=1), b=predicted(20, 130)), ttft_weight=0).chosen == "a"


def test_those_without_a_prediction_are_left_out_with_a_note():
    whole = futures(a=predicted(1, 10), b=predicted(1, 5))
    assert forecast(msgspec.structs.replace(whole, predictions={"a": predicted(1, 10)})).chosen == "a"
    nobody = forecast(msgspec.structs.replace(whole, predictions={}))
    assert (nobody.chosen, [s.note for s in nobody.scores]) == (None, [UNPREDICTED] * 2)


@given(count=st.integers(0, 12), instances=st.integers(1, 12), seed=st.integers(0, 20))
def test_a_draw_names_distinct_candidates_in_order_and_repeats_with_its_seed(count, instances, seed):
    asked = view(*(InstanceView(name=f"i{n:02}") for n in range(instances)))
    drawn = draw(asked, count, Random(seed))
    assert len(drawn) == (min(count, instances) or instances)
    assert list(drawn) == sorted(set(drawn))
    assert drawn == draw(asked, count, Random(seed))


FIGURES = (
    "running waiting running_tokens waiting_prefill_tokens used_tokens in_flight_sequences in_flight_tokens".split()
)
CANDIDATES = st.lists(
    st.builds(
        InstanceView, name=st.uuids().map(str), known=st.booleans(), **dict.fromkeys(FIGURES, st.integers(0, 5000))
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
        if DISPATCH_POLICIES.load(policy).ask is not None:
            said = {c.name: predicted(c.waiting, c.running + c.waiting + 1) for c in candidates[step:] or candidates}
            asked = msgspec.structs.replace(asked, predictions=said)
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
        assert not asked.predictions or decision.chosen in asked.predictions
        assert all(0.0 <= s.score <= 1.0 for s in decision.scores)
        assert {s.name: s.score for s in decision.scores}[decision.chosen] == 1.0
        state = after
