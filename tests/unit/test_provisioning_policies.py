"""Provisioning policies by table: when there shall be more instances, when fewer, and when nothing happens."""

from typing import Any

import msgspec
import pytest
from millrace.policies.provisioning import (
    PROVISIONING_POLICIES,
    InstanceLoad,
    LatencySample,
    ProvisioningDecision,
    ProvisioningView,
)
from millrace.policies.provisioning.thresholds import Parameters, State, quantile_ns

S = 1_000_000_000
NOW = 1_000 * S
LONG_AGO = State(changed_ns=0)
RULES = Parameters(threshold_s=10, window_s=5, cooldown_s=20, instances_min=1, instances_max=4, low_s=60)


def load(name: str, *, requests: int = 10, utilisation: float = 0.5, since_s: int = 0, stoppable: bool = True) -> Any:
    return InstanceLoad(
        name=name, since_ns=since_s * S, requests=requests, utilisation=utilisation, stoppable=stoppable
    )


def view(count: int = 2, *, utilisation: float = 0.5, predicted_s: float = 0.0, measured_s: float = 0.0, **fields: Any):
    return ProvisioningView(
        model="m",
        serving=tuple(load(f"w{i}", utilisation=utilisation) for i in range(count)),
        predicted=(LatencySample(NOW - S, round(predicted_s * S)),) if predicted_s else (),
        measured=(LatencySample(NOW - S, round(measured_s * S)),) if measured_s else (),
        **fields,
    )


def decide(
    seen: ProvisioningView,
    state: State = LONG_AGO,
    *,
    policy: str = "preempt",
    rules: Parameters = RULES,
    now_ns: int = NOW,
) -> tuple[ProvisioningDecision, State]:
    return PROVISIONING_POLICIES.load(policy).decide(seen, rules, state, now_ns)


@pytest.mark.parametrize(
    ("policy", "seen", "start"),
    [
        ("preempt", view(predicted_s=10.1), 1),
        ("preempt", view(predicted_s=10.0), 0),
        ("preempt", view(measured_s=100.0), 0),
        ("preempt", view(), 0),
        ("relief", view(measured_s=10.1), 1),
        ("relief", view(predicted_s=100.0), 0),
    ],
)
def test_each_policy_hears_its_own_latency_only(policy: str, seen: ProvisioningView, start: int) -> None:
    decision, _ = decide(seen, policy=policy)
    assert (decision.start, decision.stop) == (start, ())
    assert decision.reason


@pytest.mark.parametrize(
    ("seen", "state", "words"),
    [
        (view(4, predicted_s=99), LONG_AGO, "4 instances are the bound"),
        (view(2, predicted_s=99, absent=1, stopping=1), LONG_AGO, "4 instances are the bound"),
        (view(3, predicted_s=99, starting=1), LONG_AGO, "4 instances are the bound"),
        (view(2, predicted_s=99, starting=1), LONG_AGO, "1 are being started"),
        (view(2, predicted_s=99), State(changed_ns=NOW - 19 * S), "too soon"),
        (view(2, predicted_s=99), State(), "too soon"),
        (view(2, predicted_s=99, failures=1), State(changed_ns=NOW - 39 * S), "too soon"),
        (view(2), State(changed_ns=NOW - 19 * S), "cooling down"),
        (view(2), LONG_AGO, "neither high nor low"),
        (view(0), LONG_AGO, "fewer than 1"),
    ],
)
def test_nothing_is_started_without_room_time_or_need(seen: ProvisioningView, state: State, words: str) -> None:
    decision, _ = decide(seen, state)
    assert not decision.start
    assert not decision.stop
    assert words in decision.reason


@pytest.mark.parametrize(
    ("fields", "start"),
    [
        ({"step": 2, "starting_max": 9}, 2),
        ({"step": 9, "starting_max": 9}, 2),
        ({"step": 9, "starting_max": 1}, 1),
        ({"cooldown_s": 0.0}, 1),
    ],
)
def test_a_step_ends_at_the_bounds(fields: dict[str, Any], start: int) -> None:
    rules = msgspec.structs.replace(RULES, **fields)
    assert decide(view(2, predicted_s=99), rules=rules)[0].start == start


def test_after_a_decision_the_cool_down_begins_and_failed_starts_stretch_it() -> None:
    seen = view(predicted_s=99)
    decision, state = decide(seen)
    assert decision.start == 1
    assert state.changed_ns == NOW
    due = {failures: 20 << min(failures, 4) for failures in range(7)}
    for failures, seconds in due.items():
        later = NOW + seconds * S
        late = msgspec.structs.replace(seen, failures=failures, predicted=(LatencySample(later, 99 * S),))
        assert decide(late, state, now_ns=later - 1)[0].start == 0
        assert decide(late, state, now_ns=later)[0].start == 1


def test_low_load_must_last_before_the_emptiest_and_then_the_youngest_leaves() -> None:
    serving = (load("a", requests=3), load("b", requests=0, since_s=5), load("c", requests=0, since_s=9))
    seen = ProvisioningView(model="m", serving=tuple(msgspec.structs.replace(i, utilisation=0.1) for i in serving))
    decision, state = decide(seen)
    assert decision.stop == ()
    assert decide(seen, state, now_ns=NOW + 60 * S - 1)[0].stop == ()
    decision, after = decide(seen, state, now_ns=NOW + 60 * S)
    assert decision.stop == ("c",)
    assert "below 0.2 for 60 s" in decision.reason
    assert after.low_since_ns is None


@pytest.mark.parametrize(
    "seen",
    [
        view(1, utilisation=0.0),
        view(2, utilisation=0.0, starting=1),
        view(2, utilisation=0.0, stopping=1),
        ProvisioningView(model="m", serving=(load("a", utilisation=0, stoppable=False),) * 2),
    ],
)
def test_nobody_leaves_below_the_minimum_or_while_others_come_and_go(seen: ProvisioningView) -> None:
    low_for_ever = State(changed_ns=0, low_since_ns=0)
    assert decide(seen, low_for_ever)[0].stop == ()


def test_a_lasting_gap_below_the_minimum_is_filled_and_a_restart_is_not() -> None:
    rules = msgspec.structs.replace(RULES, instances_min=3)
    decision, state = decide(view(1), rules=rules)
    assert decision.start == 0
    assert decide(view(3), state, rules=rules, now_ns=NOW + 10 * S)[1].few_since_ns is None
    decision, _ = decide(view(1), state, rules=rules, now_ns=NOW + 20 * S)
    assert decision.start == 2
    assert decide(view(1, absent=3), state, rules=rules, now_ns=NOW + 20 * S)[0].start == 0


def test_the_quantile_is_that_of_the_window() -> None:
    samples = [LatencySample(NOW - 6 * S, 99 * S), *(LatencySample(NOW - S, n * S) for n in range(1, 11))]

    def at(quantile: float, samples_min: int = 1) -> int | None:
        rules = msgspec.structs.replace(RULES, quantile=quantile, samples_min=samples_min)
        value = quantile_ns(samples, parameters=rules, now_ns=NOW)
        return None if value is None else value // S

    assert [at(0.0), at(0.5), at(0.9), at(1.0)] == [1, 5, 9, 10]
    assert at(1.0, samples_min=11) is None


@pytest.mark.parametrize(
    "fields",
    [{"threshold_s": 0}, {"quantile": 1.5}, {"instances_max": 4, "instances_min": 5}, {"low_utilisation": 1.0}],
)
def test_parameters_out_of_range_or_unknown_are_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError, match=next(iter(fields))):
        msgspec.convert(fields, Parameters)
