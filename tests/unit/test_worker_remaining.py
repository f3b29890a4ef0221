"""The worker learns lengths from what leaves it, and tells what it expects in snapshots and handovers."""

from typing import Any

import msgspec
import pytest
from millrace.actor.engine import EngineObserved
from millrace.contracts.ingress import FinishReason
from millrace.contracts.leases import KvLeased, LeaseKv
from millrace.contracts.status import SequenceState, SequenceStatus, StatusSnapshot
from millrace.contracts.worker import CancelSequence, Sampling
from millrace.lengths.survival import OUTCOMES_MIN

from tests.unit.test_worker_leasing import taken
from tests.unit.worker_rig import MOVING, Bench, bodies, out, snapshot

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


def entry(name: str, generated: int, *, expected: int | None = None, **fields: int) -> SequenceStatus:
    status = SequenceStatus(name, SequenceState.RUNNING, 3, 3 + generated, generated, 1_000, 1, 0, expected)
    return msgspec.structs.replace(status, **fields)


def outcomes(bench: Bench) -> int:
    return int(bench.actor.snapshot()["remaining"]["outcomes"])


def test_snapshots_tell_the_rest_of_those_who_came_so_far() -> None:
    bench = Bench(info=ROOMY)
    for index in range(OUTCOMES_MIN):
        lived(bench, f"r{index}.0", 60)
    (said,) = observed(bench, entry("x.0", 30, expected=20))
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
    observed(bench, entry("x.0", 30, expected=2))
    bench.say(LeaseKv(migration="m", sequence="x.0", epoch=0, from_block=0, lease_ms=1_000), reply_to="a")
    answer = msgspec.structs.replace(taken("m", "x.0"), output_tokens=30, computed_tokens=32)
    (leased,) = bodies(bench.say(answer), KvLeased)
    assert leased.submission.expected_output_tokens == 60
