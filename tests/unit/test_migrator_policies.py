"""Candidates for a sequence, the choice among them, and when to freeze; and the configuration that says so."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from millrace.actor.errors import ConfigError
from millrace.contracts.kv import CopierKind
from millrace.contracts.plan import InstanceRole
from millrace.contracts.status import InstanceRecord, InstanceSummary
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
        (neighbour(told=record("b", kv=endpoint(copiers=[CopierKind.VERBS]))), "KV does not fit"),
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
    known = TARGET_POLICIES[policy]
    question = TargetQuestion(sequence="r.0", blocks=10, candidates=candidates, handoff=handoff)
    return known.decide(question, known.parameters(**parameters), 0, Random(1)).chosen


def view(name: str, free: int, **changes: Any) -> TargetView:
    return TargetView(name=name, blocks_free=free, blocks_total=100, **changes)


@pytest.mark.parametrize("policy", sorted(TARGET_POLICIES))
def test_nobody_is_chosen_of_nobody(policy: str) -> None:
    assert choose(policy) is None


@pytest.mark.parametrize("policy", sorted(TARGET_POLICIES))
def test_a_handoff_prefers_one_that_only_decodes(policy: str) -> None:
    decode = view("z", 20, role=InstanceRole.DECODE)
    assert choose(policy, view("b", 90), decode, handoff=True) == "z"
    assert choose(policy, view("b", 90), decode) == "b"


@pytest.mark.parametrize("policy", sorted(TARGET_POLICIES))
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
    known = TARGET_POLICIES["most_idle"]
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
        (TargetConfig(policy="best"), "'best' is none of most_idle, nearest"),
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
