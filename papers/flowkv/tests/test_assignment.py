"""Roles for devices of several kinds: candidates, their simulation, and the choice."""

from __future__ import annotations

import pytest
from millrace.contracts.plan import InstanceRole
from millrace.enginemodel.forecast.question import ReplicaRequest
from millrace.enginemodel.forecast.replica import simulate_replica
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_time_models import LinearStepTime

from papers.flowkv.assignment import AssignmentTargets, assign, candidates
from papers.flowkv.mix import InstanceShape, MixMember, serve_mix

MS = 1_000_000
ENGINE = EngineParameters(max_model_len=8_192, block_size=16, blocks_total=4_000, max_sequences=64, token_budget=1_024)
TARGETS = AssignmentTargets(ttft_s=1.0, tpot_s=0.03)
PREFILL, DECODE, BOTH = InstanceRole.PREFILL, InstanceRole.DECODE, InstanceRole.BOTH


def shape(name: str, *, step_ms: float = 10.0, token_us: float = 50.0, devices: int = 1) -> InstanceShape:
    """Its steps take ``step_ms``, and ``token_us`` for each prompt token."""
    cost = LinearStepTime(fixed=step_ms * 1e6, per_decode=5e4, per_prefill_token=token_us * 1e3).cost(ENGINE)
    return InstanceShape(
        name=name, device=name.partition("-")[0], devices=devices, cost=cost, parameters=ENGINE, token_transfer_ns=1_000
    )


def load(count: int, *, gap_ms: int, prompt: int, output: int) -> list[ReplicaRequest]:
    return [ReplicaRequest(index * gap_ms * MS, prompt, output) for index in range(count)]


def test_candidates_are_all_capable_mixes() -> None:
    found = candidates([shape("a")], {"a": 2})
    told = [", ".join(f"{m.count} {m.role}" for m in mix) for mix in found]
    assert told == ["2 both", "1 prefill, 1 decode"]
    assert [
        [(m.count, str(m.role)) for m in mix] for mix in candidates([shape("a"), shape("b")], {"a": 1, "b": 1})
    ] == [
        [(1, "both"), (1, "both")],
        [(1, "both"), (1, "decode")],
        [(1, "both"), (1, "prefill")],
        [(1, "decode"), (1, "both")],
        [(1, "decode"), (1, "prefill")],
        [(1, "prefill"), (1, "both")],
        [(1, "prefill"), (1, "decode")],
    ]


@pytest.mark.parametrize(
    ("devices", "complaint"),
    [({"a": 1, "none": 1}, "no shape fits on 1 devices of kind none"), ({"a": 10_000}, "candidates")],
)
def test_what_cannot_be_is_refused(devices: dict[str, int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        candidates([shape("a")], devices)


def test_nothing_to_simulate_is_refused() -> None:
    with pytest.raises(ValueError, match="no requests"):
        assign([], [shape("a")], {"a": 2}, TARGETS)
    with pytest.raises(ValueError, match="prefills and one that decodes"):
        serve_mix(load(1, gap_ms=1, prompt=10, output=2), [MixMember(shape("a"), PREFILL, 1)])
    with pytest.raises(ValueError, match="tpot_s"):
        AssignmentTargets(ttft_s=1.0, tpot_s=0.0)


def test_one_instance_that_does_both_is_the_replica_of_the_engine_model() -> None:
    requests, one = load(20, gap_ms=30, prompt=400, output=20), shape("a")
    mixed = serve_mix(requests, [MixMember(one, BOTH, 1)])
    alone = simulate_replica(requests, one.cost, one.parameters)
    assert mixed.ttft_ns == tuple(s.first_token_ns - r.at_ns for s, r in zip(alone, requests, strict=True))
    assert mixed.e2e_ns == tuple(s.end_ns - r.at_ns for s, r in zip(alone, requests, strict=True))


def test_apart_a_lone_request_takes_prompt_transfer_and_decode() -> None:
    """A prompt of 512 tokens: 10 ms + 25.6 ms. Its hand-off: 10 ms + 0.5 ms. Then a block's rest and nine decodes."""
    one = shape("a")
    outcome = serve_mix(
        load(1, gap_ms=1, prompt=512, output=10), [MixMember(one, PREFILL, 1), MixMember(one, DECODE, 1)]
    )
    assert outcome.ttft_ns[0] == pytest.approx(35.6 * MS)
    decoded_ns = outcome.e2e_ns[0] - outcome.ttft_ns[0] - one.transfer_ns - 512 * one.token_transfer_ns
    assert decoded_ns == pytest.approx(9 * 10.05 * MS, rel=0.01)


def test_an_output_of_one_token_is_handed_to_nobody() -> None:
    one = shape("a")
    outcome = serve_mix(
        load(3, gap_ms=50, prompt=100, output=1), [MixMember(one, PREFILL, 1), MixMember(one, DECODE, 1)]
    )
    assert outcome.e2e_ns == outcome.ttft_ns


def test_an_instance_that_does_both_takes_hand_offs_beside_its_own() -> None:
    one = shape("a")
    requests = load(30, gap_ms=20, prompt=800, output=40)
    outcome = serve_mix(requests, [MixMember(one, PREFILL, 1), MixMember(one, BOTH, 1)])
    assert all(0 < ttft < e2e for ttft, e2e in zip(outcome.ttft_ns, outcome.e2e_ns, strict=True))


def test_the_kind_that_computes_fast_prefills_and_the_one_with_short_steps_decodes() -> None:
    computes, reads = shape("computes", step_ms=25.0, token_us=20.0), shape("reads", step_ms=6.0, token_us=150.0)
    rated = assign(
        load(60, gap_ms=60, prompt=2_000, output=60), [computes, reads], {"computes": 1, "reads": 1}, TARGETS
    )
    assert rated[0].name == "1 computes prefill, 1 reads decode"
    swapped = next(each for each in rated if each.name == "1 computes decode, 1 reads prefill")
    assert rated[0].within > swapped.within


def test_a_larger_shape_is_chosen_where_steps_are_too_long_otherwise() -> None:
    slow, fast = shape("a-tp1", step_ms=40.0), shape("a-tp2", step_ms=22.0, devices=2)
    rated = assign(load(30, gap_ms=200, prompt=200, output=50), [slow, fast], {"a": 2}, TARGETS)
    assert rated[0].name == "1 a-tp2 both"


def test_kv_that_comes_along_is_not_computed_again() -> None:
    one = shape("a")
    came = ReplicaRequest(0, 801, 5, kv_tokens=800)
    anew = ReplicaRequest(0, 801, 5)
    times = [simulate_replica([each], one.cost, one.parameters)[0].end_ns for each in (came, anew)]
    assert times[0] < times[1] - 800 * 40_000
    with pytest.raises(ValueError, match="brings KV"):
        simulate_replica([ReplicaRequest(0, 10, 5, kv_tokens=10)], one.cost, one.parameters)
