"""Baselines of Block's dispatch by table, and one of them through the slot in a whole simulated cluster."""

from random import Random

import msgspec
import pytest
from millrace.enginemodel.coefficients import load_step_time
from millrace.policies.dispatch import DISPATCH_POLICIES, DispatchView, InstanceView

from papers import PAPERS
from simulator.scenarios.reading import read_scenario
from simulator.scenarios.running import run_scenario

SECOND = 1_000_000_000
INFAAS, LLUMNIX = f"{PAPERS}/block/infaas.py", f"{PAPERS}/block/llumnix.py"


def seen(name: str, **fields: int) -> InstanceView:
    return InstanceView(name=name, known=True, total_tokens=16_000, **fields)


def view(*candidates: InstanceView, sequences: int = 1) -> DispatchView:
    return DispatchView(model="m", sequences=sequences, length_tokens=10, candidates=candidates)


def decide(name: str, asked: DispatchView, *, seed: int = 1, **given):
    policy, parameters = DISPATCH_POLICIES.choose(name, given)
    return policy.decide(asked, parameters, policy.initial_state, 0, Random(seed))[0].chosen


@pytest.mark.parametrize(
    ("policy", "candidates", "chosen"),
    [
        # Memory per running sequence: 100 against 150.
        (INFAAS, [seen("a", used_tokens=400, running=4), seen("b", used_tokens=300, running=2)], "a"),
        # An idle instance has nothing in use; a batch of nothing counts as one.
        (INFAAS, [seen("a", used_tokens=400, running=4), seen("b")], "b"),
        # What is in flight counts in memory and in the batch: (0 + 300) / 1 against 100.
        (
            INFAAS,
            [seen("a", used_tokens=400, running=4), seen("b", in_flight_tokens=300, in_flight_sequences=1)],
            "a",
        ),
        # The queue does not count for INFaaS++, but for Llumnix: (400 + 800) / 4 = 300 against 150.
        (
            INFAAS,
            [
                seen("a", used_tokens=400, running=4, waiting_prefill_tokens=800),
                seen("b", used_tokens=300, running=2),
            ],
            "a",
        ),
        (
            LLUMNIX,
            [
                seen("a", used_tokens=400, running=4, waiting_prefill_tokens=800),
                seen("b", used_tokens=300, running=2),
            ],
            "b",
        ),
        # In flight stands in Llumnix's queue: (300 + 200) / 2 = 250 against 240.
        (
            LLUMNIX,
            [
                seen("a", used_tokens=300, running=2, in_flight_tokens=200, in_flight_sequences=5),
                seen("b", used_tokens=240, running=1),
            ],
            "b",
        ),
        (LLUMNIX, [InstanceView(name="a"), seen("b", used_tokens=10, running=1)], "a"),
    ],
)
def test_a_policy_prefers_the_lower_load(policy, candidates, chosen):
    for seed in range(5):
        assert decide(policy, view(*candidates), seed=seed, memory="used") == chosen


@pytest.mark.parametrize("policy", [INFAAS, LLUMNIX])
def test_most_free_memory_per_sequence_is_another_rule_than_least_used(policy):
    # 500 used per sequence on an instance with room, 400 on one that is full.
    asked = view(seen("full", used_tokens=16_000, running=40), seen("room", used_tokens=5_000, running=10))
    assert decide(policy, asked, memory="used") == "full"
    assert decide(policy, asked) == "room"


def test_free_memory_counts_the_queue_for_llumnix_only():
    asked = view(
        seen("queue", used_tokens=4_000, running=10, waiting_prefill_tokens=9_000),
        seen("none", used_tokens=8_000, running=10),
    )
    assert decide(INFAAS, asked, memory="free") == "queue"
    assert decide(LLUMNIX, asked, memory="free") == "none"


@pytest.mark.parametrize("policy", [INFAAS, LLUMNIX])
def test_stated_cases(policy):
    assert decide(policy, view()) is None
    assert {decide(policy, view(seen("a"), seen("b")), seed=seed) for seed in range(60)} == {"a", "b"}
    with pytest.raises(msgspec.ValidationError, match="memory"):
        msgspec.convert({"memory": "some"}, DISPATCH_POLICIES.load(policy).parameters)


def run(asked: DispatchView, *, state=None, now_ns: int = 0, **given):
    policy, parameters = DISPATCH_POLICIES.choose(f"{PAPERS}/block/fewest_requests_per_minute.py", given)
    return policy.decide(asked, parameters, policy.initial_state if state is None else state, now_ns, Random(1))


def test_fewest_requests_per_minute_counts_sequences_of_a_sliding_window():
    asked = view(InstanceView(name="a"), InstanceView(name="b"))
    first, state = run(view(InstanceView(name="a"), sequences=3), now_ns=0)
    assert first.chosen == "a"
    for second in (1, 2, 3):
        decision, state = run(asked, state=state, now_ns=second * SECOND)
        assert decision.chosen == "b"
    assert state.totals == {"a": 3, "b": 3}
    # At 60 s a's three have left the window, b's have not.
    decision, state = run(asked, state=state, now_ns=60 * SECOND)
    assert decision.chosen == "a"
    # At 61 s b's first has left too: 2 against 1.
    decision, state = run(asked, state=state, now_ns=61 * SECOND)
    assert state.totals == {"a": 2, "b": 2}


def test_the_window_of_fewest_requests_is_a_parameter():
    asked = view(InstanceView(name="a"), InstanceView(name="b"))
    _, state = run(view(InstanceView(name="a")), now_ns=0, window_s=2)
    decision, state = run(asked, state=state, now_ns=SECOND, window_s=2)
    assert decision.chosen == "b"
    _, state = run(asked, state=state, now_ns=10 * SECOND, window_s=2)
    assert sum(state.totals.values()) == 1


@pytest.mark.parametrize("policy", ["infaas.py", "llumnix.py", "fewest_requests_per_minute.py"])
def test_a_cluster_places_by_it(policy):
    lengths = 'workload.lengths={kind="fitted", name="sharegpt", total_max=4095}'
    settings = ("workload.count=60", "workload.warm_up=0", lengths, f"dispatch.policy={policy}")
    outcome = run_scenario(read_scenario(PAPERS / "block" / "testbed.toml", settings), step_times=load_step_time)
    assert outcome.outcomes == {"completed": 60}
    assert len({record.instance for record in outcome.finished}) == 12
