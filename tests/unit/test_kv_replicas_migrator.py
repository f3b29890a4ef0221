"""KV replicas as a source's migrator makes them: rounds, proofs, what ends them."""

from typing import Any

import pytest
from millrace.contracts.kv import KvGroup, KvNeed, KvRefusal
from millrace.contracts.leases import EndLease, FreezeSequence, LeaseKv, PrepareMigration, PullKv, UnreserveKv
from millrace.contracts.migration import KvReplicated, MigrationOutcome

from services.migrator.config import ReplicaConfig
from tests.unit.migrator_rig import BLOCK_TOKENS, Rig, endpoint, record


def rig(*names: str, **changes: Any) -> Rig:
    fields = {"enabled": True, "tokens_min": 16, "interval_ms": 100, **changes}
    bench = Rig(*(names or ("a", "b", "c")), replicas=ReplicaConfig(**fields))
    for worker in bench.workers.values():
        worker.blocks_free = 1_000
    return bench


def decoding() -> Rig:
    """A sequence runs at the first of three."""
    bench = rig()
    bench.decode("a")
    return bench


def replicated(bench: Rig) -> list[KvReplicated]:
    return bench.published(KvReplicated)


STATE = endpoint(groups=[KvGroup(need=KvNeed.STATE, block_tokens=16, block_bytes=9)])


@pytest.mark.parametrize(
    ("changes", "kv"), [({"enabled": False}, endpoint()), ({"tokens_min": 10_000}, endpoint()), ({}, STATE)]
)
def test_none_are_made_where_they_are_off_or_a_sequence_is_short_or_its_layers_keep_a_state(changes, kv) -> None:
    bench = rig(**changes)
    bench.register(record("a", kv=kv))
    bench.decode("a")
    bench.run(3_000)
    assert not bench.published(LeaseKv)


def test_full_blocks_are_copied_proven_and_told() -> None:
    bench = decoding()
    bench.run(3_000)
    (reserve,) = bench.published(PrepareMigration)
    assert reserve.replica
    assert reserve.epoch == 3
    assert len(reserve.token_ids) == reserve.blocks * BLOCK_TOKENS
    told = replicated(bench)
    assert len(told) > 5
    assert [body.tokens for body in told] == sorted(body.tokens for body in told)
    assert {body.epoch for body in told} == {3}
    assert {body.instance for body in told} <= {"b", "c"}
    assert told[-1].incarnation == 5
    tokens = len(bench.workers["a"].sequences["r.0"].outputs(bench.now_ns)) + 40
    assert tokens - told[-1].tokens < 200 // 5 + BLOCK_TOKENS, "a round each 100 ms, a token each 5"


def test_ingress_hears_of_blocks_only_after_the_lease_was_proven_and_the_holder_knows() -> None:
    bench = decoding()
    bench.run(3_000)
    asked = (LeaseKv, PrepareMigration, PullKv, KvReplicated)
    words = [type(body).__name__ for _, body in bench.said if isinstance(body, asked)]
    assert words[: words.index("KvReplicated")] == ["LeaseKv", "PrepareMigration", "PullKv", "LeaseKv", "PullKv"]
    pulls = bench.published(PullKv)
    assert pulls[0].proven == 0
    assert pulls[0].blocks
    assert not pulls[1].blocks
    assert pulls[1].proven == len(pulls[0].blocks)


def test_each_round_has_a_lease_of_its_own_that_ends_with_it() -> None:
    bench = decoding()
    bench.run(2_000)
    leases = {body.migration for body in bench.published(LeaseKv)}
    ended = {body.migration for body in bench.published(EndLease)}
    assert len(leases) > 3
    assert len(leases - ended) <= 1
    assert not any(body.moved for body in bench.published(EndLease))
    assert not bench.published(FreezeSequence)
    assert all(pull.lease in leases for pull in bench.published(PullKv) if pull.blocks)


def test_a_lease_that_was_lost_proves_nothing() -> None:
    bench = decoding()
    seen: set[str] = set()

    def lost_when_renewed(_sender: str, body: Any) -> bool:
        if isinstance(body, LeaseKv):
            bench.workers["a"].refuse = {LeaseKv: KvRefusal.LEASE_LOST} if body.migration in seen else {}
            seen.add(body.migration)
        return False

    bench.lose = lost_when_renewed
    bench.run(6_000)
    assert not replicated(bench)
    pulls = bench.published(PullKv)
    assert len(pulls) > 1
    assert all(pull.proven == 0 for pull in pulls)
    assert {pull.from_block for pull in pulls if pull.blocks} == {0}


def test_a_holder_that_knows_it_no_more_is_replaced_and_ingress_hears() -> None:
    bench = decoding()
    bench.run(2_000)
    first = replicated(bench)[-1]
    bench.workers[first.instance].refuse[PullKv] = KvRefusal.INVALID
    bench.run(2_000)
    later = replicated(bench)[replicated(bench).index(first) + 1 :]
    gone = next(body for body in later if body.replica == first.replica and not body.tokens)
    assert gone.instance == first.instance
    assert later[-1].instance != first.instance
    assert later[-1].tokens > first.tokens


def test_a_source_that_no_longer_knows_the_sequence_leaves_the_replica_to_ingress() -> None:
    bench = decoding()
    bench.run(2_000)
    assert replicated(bench)
    bench.workers["a"].sequences.clear()
    bench.run(3_000)
    assert not bench.published(UnreserveKv), "it may be needed right now"
    assert not bench.migrators["a"].snapshot()["replicas"]


def test_a_sequence_that_moved_frees_its_replica() -> None:
    bench = decoding()
    bench.run(2_000)
    held = replicated(bench)[-1]
    other = ({"b", "c"} - {held.instance}).pop()
    assert bench.migrate(target=other).outcome is MigrationOutcome.MOVED
    assert held.replica in {body.migration for body in bench.published(UnreserveKv)}
    bench.run(2_000)
    assert replicated(bench)[-1].epoch > 3, "its new instance makes one of its own"


def test_a_migration_ends_the_round_before_it_takes_a_lease_of_its_own() -> None:
    bench = decoding()
    bench.workers["b"].pull_ns = bench.workers["c"].pull_ns = 0
    bench.run(2_000)
    for _ in range(40):  # at any moment of a round
        since = len(bench.said)
        bench.run(7)
        bench.order(target="nowhere")
        mine = [body for sender, body in bench.said[since:] if sender == "a"]
        open_leases: set[str] = set()
        for body in mine:
            if isinstance(body, LeaseKv):
                open_leases.add(body.migration)
            elif isinstance(body, EndLease):
                open_leases.discard(body.migration)
        assert not any("." in name for name in open_leases) or not bench.migrators["a"].snapshot()["out"]


def test_the_bandwidth_bounds_what_is_copied() -> None:
    slow = rig(bytes_per_s=10_000)  # ten blocks a second
    slow.decode("a", prompt=400)
    slow.run(4_300)
    copied = sum(len(pull.blocks) for pull in slow.published(PullKv))
    assert 20 <= copied <= 45


def test_only_so_many_sequences_get_one_the_longest_first() -> None:
    bench = rig(per_instance_max=2)
    for number, prompt in enumerate((40, 200, 120)):
        bench.decode("a", f"r{number}.0", prompt=prompt)
    bench.run(4_000)
    assert {body.sequence for body in replicated(bench)} == {"r1.0", "r2.0"}


def test_a_migrator_that_stops_frees_what_it_made() -> None:
    bench = decoding()
    bench.run(2_000)
    held = replicated(bench)[-1]
    bench.stop("a")
    assert held.replica in {body.migration for body in bench.published(UnreserveKv)}
