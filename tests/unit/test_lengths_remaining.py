"""A sequence's rest: the choice of an estimate, and how a worker learns lengths and tells it."""

from typing import Any

import msgspec
import numpy as np
import pytest
from millrace.actor.engine import EngineObserved
from millrace.contracts.ingress import FinishReason
from millrace.contracts.leases import KvLeased, LeaseKv
from millrace.contracts.status import SequenceState, SequenceStatus, StatusSnapshot
from millrace.contracts.worker import CancelSequence, Sampling
from millrace.lengths.remaining import STALE_TOKENS, RemainingLengths
from millrace.lengths.survival import OUTCOMES_MIN, Survival

from tests.unit.test_worker_leasing import taken
from tests.unit.worker_rig import MOVING, Bench, bodies, out, snapshot


def entry(generated: int, *, expected: int | None = None, name: str = "r.0", **fields: int) -> SequenceStatus:
    status = SequenceStatus(name, SequenceState.RUNNING, 10, 10 + generated, generated, 50_000, 1, 0, expected)
    return msgspec.structs.replace(status, **fields)


def of_engine(generated: int, *, at: int, p50: int, p90: int, name: str = "r.0") -> SequenceStatus:
    return entry(generated, expected=at + p50, expected_p90=at + p90, expected_at=at, name=name)


@pytest.fixture
def taught() -> RemainingLengths:
    """Has seen lengths uniform up to 1,000."""
    survival = Survival()
    for length in np.random.default_rng(1).integers(1, 1_001, 2_000).tolist():
        survival.learn(length)
    return RemainingLengths(survival)


def told(known: RemainingLengths, status: SequenceStatus) -> SequenceStatus:
    return known.reported([status])[0]


def test_a_submitted_length_stands_until_it_is_reached_with_survivals_p90(taught: RemainingLengths) -> None:
    said = told(taught, entry(200, expected=300))
    assert said.expected_output_tokens == 300
    assert said.expected_p90 == pytest.approx(920, abs=30)
    assert said.expected_at == 200


def test_an_outrun_length_becomes_the_median_of_survivors(taught: RemainingLengths) -> None:
    said = told(taught, entry(400, expected=300))
    assert said.expected_output_tokens == pytest.approx(700, abs=30)
    assert said.expected_output_tokens <= said.expected_p90


def test_nothing_submitted_is_survival_from_the_start_within_max_tokens(taught: RemainingLengths) -> None:
    assert told(taught, entry(0)).expected_output_tokens == pytest.approx(500, abs=30)
    bounded = told(taught, entry(100, max_tokens=150))
    assert (bounded.expected_output_tokens, bounded.expected_p90) == (150, 150)
    used_up = told(taught, entry(100, max_tokens=100))
    assert (used_up.expected_output_tokens, used_up.expected_p90) == (101, 101)


def test_p90_is_never_below_a_long_submitted_length(taught: RemainingLengths) -> None:
    said = told(taught, entry(0, expected=5_000))
    assert (said.expected_output_tokens, said.expected_p90) == (5_000, 5_000)


def test_a_fresh_estimate_of_the_engine_stands_and_a_stale_one_does_not(taught: RemainingLengths) -> None:
    fresh = of_engine(300, at=290, p50=50, p90=80)
    assert told(taught, fresh) == fresh
    stale = told(taught, of_engine(300 + STALE_TOKENS, at=299, p50=50, p90=80))
    assert stale.expected_at == 300 + STALE_TOKENS


@pytest.mark.parametrize(("at", "p50", "p90"), [(10, -3, 5), (10, 0, 5), (10, 9, 4), (-5, 20, 30)])
def test_estimates_that_no_sequence_can_have_are_counted_and_ignored(
    taught: RemainingLengths, at: int, p50: int, p90: int
) -> None:
    said = told(taught, of_engine(20, at=at, p50=p50, p90=p90))
    assert said.expected_at == 20
    assert taught.ignored == 1


# A worker learns lengths from what leaves it, and tells what it expects in snapshots and handovers.


ROOMY = msgspec.structs.replace(MOVING, max_model_len=10_000)
SAMPLING = Sampling(max_tokens=1_000)


def lived(bench: Bench, name: str, tokens: int, **fields: Any) -> None:
    """One sequence from submit to its end."""
    bench.running(name, sampling=SAMPLING, **fields)
    bench.step(out(*range(tokens), sequence=name, finish=FinishReason.STOP))


def observed(bench: Bench, *entries: SequenceStatus) -> list[SequenceStatus]:
    """Return what is published of these sequences."""
    seen = msgspec.structs.replace(snapshot(bench.now + 40_000_000), running=list(entries))
    (status,) = bodies(bench.say(EngineObserved(snapshot=seen), after_ms=50), StatusSnapshot)
    return list(status.running)


def outcomes(bench: Bench) -> int:
    return int(bench.actor.snapshot()["remaining"]["outcomes"])


def test_snapshots_tell_the_rest_of_those_who_came_so_far() -> None:
    bench = Bench(info=ROOMY)
    for index in range(OUTCOMES_MIN):
        lived(bench, f"r{index}.0", 60)
    (said,) = observed(bench, entry(30, name="x.0", expected=20, max_tokens=1_000))
    assert (said.expected_output_tokens, said.expected_p90, said.expected_at) == (60, 60, 30)


def test_what_leaves_unfinished_counts_as_long_as_it_was_seen() -> None:
    bench = Bench(info=ROOMY)
    bench.running("r1.0", sampling=SAMPLING)
    bench.step(out(1, 2, 3))
    bench.say(CancelSequence(sequence="r1.0", epoch=0))
    assert outcomes(bench) == 1
    # Nobody ended: one sequence and the prior, whose hazard is 1 / 2, 1 / 3 and 1 / 4, were at risk.
    alive = bench.actor.reporter.remaining.survival.curve()[4]
    assert alive == pytest.approx((1 - 1 / 4) * (1 - 1 / 6) * (1 - 1 / 8))
    lived(bench, "r2.0", 2, output_token_ids=[7] * 9)
    assert outcomes(bench) == 2


def test_a_sequence_cancelled_before_its_first_token_teaches_nothing() -> None:
    bench = Bench(info=ROOMY)
    bench.running("r1.0")
    bench.say(CancelSequence(sequence="r1.0", epoch=0))
    assert outcomes(bench) == 0


def test_a_handover_carries_the_length_expected_now() -> None:
    bench = Bench(info=ROOMY)
    for index in range(OUTCOMES_MIN):
        lived(bench, f"r{index}.0", 60)
    bench.running("x.0", sampling=SAMPLING, expected_output_tokens=2)
    bench.step(out(*range(30), sequence="x.0"))
    observed(bench, entry(30, name="x.0", expected=2, max_tokens=1_000))
    bench.say(LeaseKv(migration="m", sequence="x.0", epoch=0, from_block=0, lease_ms=1_000), reply_to="a")
    answer = msgspec.structs.replace(taken("m", "x.0"), output_tokens=30, computed_tokens=32)
    (leased,) = bodies(bench.say(answer), KvLeased)
    assert leased.submission.expected_output_tokens == 60
