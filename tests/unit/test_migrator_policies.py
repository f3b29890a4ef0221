"""Candidates for a sequence, the choice among them, and when to freeze; and the configuration that says so."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest
from millrace.actor.errors import ConfigError
from millrace.contracts.kv import CopierKind
from millrace.contracts.plan import InstanceRole
from millrace.contracts.status import EngineTotals, InstanceRecord, InstanceSummary, LoadIndicators
from millrace.policies.migration import (
    TARGET_POLICIES,
    Neighbour,
    TargetQuestion,
    TargetView,
    Wish,
    freeze_now,
    sifted,
)

from services.migrator.config import MigratorConfig, MigratorLimits, TargetConfig, target_policy
from services.migrator.pairs import PairFigures
from tests.unit.migrator_rig import FakeWorker, endpoint, record


def summary(name: str, **changes: Any) -> InstanceSummary:
    worker = FakeWorker(name)
    for field, value in changes.items():
        setattr(worker, field, value)
    return worker.summary(0)


def neighbour(name: str = "b", told: InstanceRecord | None = None, **changes: Any) -> Neighbour:
    fields: dict[str, Any] = {"record": told or record(name), "summary": summary(name)}
    return Neighbour(**fields | changes)


WISH = Wish(source=record("a"), blocks=10)


@pytest.mark.parametrize(
    ("other", "note"),
    [
        (neighbour(), ""),
        (neighbour(summary=None), "not heard"),
        (neighbour(summary=summary("b", draining=True)), "draining"),
        (neighbour(summary=summary("b", blocks_free=9)), "no room"),
        (neighbour(summary=summary("b", blocks_free=15), blocks_promised=6), "no room"),
        (neighbour(summary=summary("b", blocks_free=15), blocks_promised=5), ""),
        (neighbour(role=InstanceRole.PREFILL), "prefill only"),
        (neighbour(role=InstanceRole.DECODE), ""),
        (neighbour(told=record("b", kv=None, kv_refusal="off")), "off"),
        (neighbour(told=record("b", kv=endpoint(fingerprint="g"))), "KV does not fit"),
        (neighbour(told=record("b", kv=endpoint(copiers=[CopierKind.CUDA]))), "KV does not fit"),
    ],
)
def test_who_may_take_it(other: Neighbour, note: str) -> None:
    candidates, filtered = sifted(WISH, [other])
    assert ([view.name for view in candidates], [score.note for score in filtered]) == (
        (["b"], []) if not note else ([], [note])
    )


def test_the_source_and_other_models_are_not_even_told_of() -> None:
    assert sifted(WISH, [neighbour("a"), neighbour(told=record("b", model="other"))]) == ((), ())


def test_one_that_has_refused_is_not_asked_again() -> None:
    wish = Wish(source=record("a"), blocks=1, excluded=frozenset({"b"}))
    assert sifted(wish, [neighbour()])[1][0].note == "refused it"


def test_without_kv_only_room_matters() -> None:
    wish = Wish(source=record("a", kv=None), blocks=1, recompute=True)
    assert sifted(wish, [neighbour(told=record("b", kv=None))])[0]


def choose(policy: str, *candidates: TargetView, handoff: bool = False, **parameters: Any) -> str | None:
    known = TARGET_POLICIES.load(policy)
    question = TargetQuestion(sequence="r.0", blocks=10, candidates=candidates, handoff=handoff)
    return known.decide(question, known.parameters(**parameters), 0, Random(1)).chosen


def view(name: str, free: int, **changes: Any) -> TargetView:
    return TargetView(name=name, blocks_free=free, blocks_total=100, **changes)


@pytest.mark.parametrize("policy", TARGET_POLICIES.names)
def test_nobody_is_chosen_of_nobody(policy: str) -> None:
    assert choose(policy) is None


@pytest.mark.parametrize("policy", TARGET_POLICIES.names)
def test_a_handoff_prefers_one_that_only_decodes(policy: str) -> None:
    decode = view("z", 20, role=InstanceRole.DECODE)
    assert choose(policy, view("b", 90), decode, handoff=True) == "z"
    assert choose(policy, view("b", 90), decode) == "b"


@pytest.mark.parametrize("policy", TARGET_POLICIES.names)
def test_equal_ones_go_by_name(policy: str) -> None:
    assert choose(policy, view("b", 50), view("c", 50)) == "b"


@pytest.mark.parametrize(
    ("policy", "chosen"),
    [("most_idle", "far"), ("nearest", "near")],
)
def test_how_much_memory_a_shorter_way_is_worth(policy: str, chosen: str) -> None:
    assert choose(policy, view("far", 90), view("near", 40, same_machine=True)) == chosen


def test_within_a_band_the_nearer_one_wins_then_the_shorter_queue() -> None:
    assert choose("most_idle", view("far", 57), view("near", 52, same_machine=True)) == "near"
    assert choose("most_idle", view("far", 57), view("near", 52, same_machine=True), bands=100) == "far"
    assert choose("most_idle", view("b", 57, waiting=3), view("c", 52)) == "c"


def test_a_decision_says_why_with_scores() -> None:
    known = TARGET_POLICIES.load("most_idle")
    question = TargetQuestion(sequence="r.0", blocks=10, candidates=(view("b", 60), view("c", 30)))
    decision = known.decide(question, known.parameters(), 0, Random(1))
    assert decision.reason == "best of 2: 50 of 100 blocks idle with it, elsewhere"
    assert [(score.name, score.score) for score in decision.scores] == [("b", 0.5), ("c", 0.2)]


@pytest.mark.parametrize(
    ("new_blocks", "rounds", "rounds_max", "freezes"),
    [(5, 0, 8, False), (2, 3, 8, False), (1, 1, 8, True), (0, 0, 8, True), (9, 8, 8, True), (9, 0, 0, True)],
)
def test_when_to_freeze(new_blocks: int, rounds: int, rounds_max: int, freezes: bool) -> None:
    assert freeze_now(new_blocks=new_blocks, rounds=rounds, rounds_max=rounds_max) is freezes


# configuration


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (TargetConfig(policy="best"), "'best' is none of least_delay, most_idle, nearest"),
        (TargetConfig(parameters={"bands": 0}), "bands must be in"),
        (TargetConfig(parameters={"weight": 1}), "weight"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_by_name(target: TargetConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        target_policy(target)


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"out_max": 0}, "out_max"), ({"margin_ms": 200}, "half of freeze_ms"), ({"rounds_max": -1}, "rounds_max")],
)
def test_limits_that_cannot_be_are_refused_by_name(fields: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MigratorLimits(**fields)


@pytest.mark.parametrize("instances", [[], ["a", "a"]])
def test_a_migrator_has_instances_each_once(instances: list[str]) -> None:
    with pytest.raises(ValueError, match="instances"):
        MigratorConfig(instances=instances)


# the pair: transfer against what it delays

MB = 1_000_000


def decoder(name: str, **changes: Any) -> TargetView:
    fields: dict[str, Any] = {"blocks_free": 900, "blocks_total": 1000, "role": InstanceRole.DECODE, "step_ns": 20 * MB}
    return TargetView(name=name, **fields | changes)


def paired(*candidates: TargetView, blocks: int = 100, rest: int | None = 100, **parameters: Any) -> str | None:
    known = TARGET_POLICIES.load("least_delay")
    question = TargetQuestion(
        sequence="r.0",
        blocks=blocks + 4,
        candidates=candidates,
        handoff=True,
        blocks_held=blocks,
        block_bytes=2 * MB,
        rest_tokens=rest,
    )
    return known.decide(question, known.parameters(**parameters), 0, Random(1)).chosen


def test_transfer_is_weighed_against_the_decoding_that_follows() -> None:
    near = decoder("near", bytes_per_s=10e9, step_ns=30 * MB)
    far = decoder("far", bytes_per_s=1e9, step_ns=20 * MB)
    # 200 MB: 0.02 s against 0.2 s of transfer; 100 tokens: 3 s against 2 s of decoding.
    assert paired(near, far) == "far"
    assert paired(near, far, rest=10) == "near"
    assert paired(near, far, blocks=1000) == "near"
    assert paired(near, decoder("far", bytes_per_s=1e9, step_ns=20 * MB, blocks_there=900), blocks=1000) == "far"


def test_what_it_delays_there_counts_so_that_the_nearest_is_not_herded_to() -> None:
    near, far = decoder("near", bytes_per_s=10e9, running=40), decoder("far", bytes_per_s=1e9, running=2)
    assert paired(near, far) == "far"
    assert paired(near, far, growth=0.0) == "near"


def test_unmeasured_pairs_count_as_near_or_far_and_silent_steps_as_usual_ones() -> None:
    far, near = decoder("far", step_ns=0), decoder("near", step_ns=0, same_machine=True)
    assert paired(far, near) == "near"
    assert paired(far, near, near_bytes_per_s=1e8) == "far"
    assert paired(far, near, rest=None) == "near"


def test_a_queue_counts_where_memory_is_short_and_one_that_does_both_comes_last() -> None:
    assert paired(decoder("a", waiting=1, step_ns=1 * MB, blocks_free=150), decoder("b")) == "b"
    assert paired(decoder("a", waiting=1, step_ns=1 * MB), decoder("b")) == "a", "it has just arrived"
    assert paired(decoder("a", role=InstanceRole.BOTH, step_ns=1 * MB), decoder("b", waiting=3)) == "b"
    assert paired() is None


@pytest.mark.parametrize("wrong", [{"growth": -0.1}, {"step_ms": 0.0}, {"rest_tokens": 0}, {"far_bytes_per_s": -1.0}])
def test_parameters_of_the_pair_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        target_policy(TargetConfig(policy="least_delay", parameters=wrong))


def test_bandwidth_steps_and_prefixes_are_what_was_measured() -> None:
    figures, source, target = PairFigures(), record("a"), record("b")
    view = TargetQuestion(sequence="r.0", blocks=4, candidates=(decoder("b", step_ns=0),))
    figures.pulled(source, target, 100, 1)  # too small to say anything
    figures.pulled(source, target, 10 * MB, 1_000 * MB)
    figures.pulled(source, target, 20 * MB, 1_000 * MB)
    for steps, busy_ns in ((100, 0), (110, 250 * MB)):
        totals = EngineTotals(steps=steps, busy_ns=busy_ns)
        told = msgspec.structs.replace(summary("b"), indicators=LoadIndicators(totals=totals))
        figures.on_summary(told)
    figures.moved("b", [1, 2, 3])
    (known,) = figures.told(view, source, {"b": target}, [1, 2, 9, 3]).candidates
    assert known.bytes_per_s == pytest.approx(12e6)
    assert (known.step_ns, known.blocks_there) == (25 * MB, 2)
