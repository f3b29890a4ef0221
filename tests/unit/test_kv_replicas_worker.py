"""KV replicas at their holder: bounds, growth, what a continuation gets of one, and what ends it."""

from typing import Any

import pytest
from millrace.actor.effects import Effect
from millrace.actor.engine import AddToEngine, PullIntoEngine, ReserveInEngine, SequenceAdded, UnreserveInEngine
from millrace.contracts.kv import KvRefusal
from millrace.contracts.leases import KvRefused, MigrationPrepared, PrepareMigration, PullKv
from millrace.contracts.local import TimerFired
from millrace.contracts.worker import CancelSequence, SequenceAccepted

from services.worker.config import MigrationConfig, ReplicaBounds
from tests.unit.test_worker_reserving import HANDOVER, bench, pull, read, reserve, room
from tests.unit.worker_rig import INFO, Bench, bodies, denied, only

#: Of its blocks replicas may have half.
HOLDS = MigrationConfig(replicas=ReplicaBounds(memory_share=0.5, count_max=3, hold_ms=5_000))
HALF = INFO.blocks_total // 2


def holder(**options: Any) -> Bench:
    return bench(**{"migration": HOLDS, **options})


def replica(**fields: Any) -> PrepareMigration:
    """Two full blocks of the sequence."""
    tokens = 2 * INFO.block_size
    return reserve(**{"replica": True, "blocks": 2, "token_ids": list(range(tokens)), **fields})


def held(*, proven: int = 2) -> Bench:
    """A worker with a replica whose two blocks were read, and ``proven`` of them proven."""
    made = holder()
    made.say(replica(), reply_to="t")
    made.say(room())
    made.say(pull(0), reply_to="t")
    made.say(read(0))
    made.say(PullKv(migration="m1", from_block=2, blocks=[], read_ms=0, proven=proven), reply_to="t")
    return made


def continued(made: Bench, *, known: int | None = None, **fields: Any) -> list[Effect]:
    """The sequence continues here, with so many tokens known to ingress."""
    known = 2 * INFO.block_size + 5 if known is None else known
    return made.submit(
        **{"epoch": 4, "prompt_token_ids": [7] * (known - 3), "output_token_ids": [8] * 3, "replica": "m1", **fields}
    )


def test_a_worker_holds_none_by_default() -> None:
    (no,) = bodies(bench().say(replica(), reply_to="t"), KvRefused)
    assert no.reason is KvRefusal.UNABLE


def test_a_replica_is_reserved_as_such_and_takes_no_slot_of_migrations() -> None:
    made = holder()
    (asked,) = only(made.say(replica(), reply_to="t"), ReserveInEngine)
    assert asked.replica
    assert bodies(made.say(room()), MigrationPrepared)
    for number in range(HOLDS.reservations_max):
        assert only(made.say(reserve(migration=f"x{number}", sequence=f"s{number}.0"), reply_to="t"), ReserveInEngine)


def test_replicas_stay_within_their_number_and_their_share() -> None:
    made = holder()
    for number in range(3):
        assert only(made.say(replica(migration=f"m{number}", sequence=f"s{number}.0"), reply_to="t"), ReserveInEngine)
    (no,) = bodies(made.say(replica(migration="m9", sequence="s9.0"), reply_to="t"), KvRefused)
    assert no.reason is KvRefusal.TOO_MANY
    large = replica(blocks=HALF + 1, token_ids=list(range(30)))
    (no,) = bodies(holder().say(large, reply_to="t"), KvRefused)
    assert no.reason is KvRefusal.NO_BLOCKS


def test_a_pull_beyond_the_share_is_refused_and_the_replica_stays() -> None:
    made = held()
    more = pull(2, blocks=[[block] for block in range(HALF)], checksums=[])
    (no,) = bodies(made.say(more, reply_to="t"), KvRefused)
    assert no.reason is KvRefusal.NO_BLOCKS
    assert only(continued(made), AddToEngine)[0].sequence.handover is not None


def test_a_pull_names_the_lease_to_the_engine() -> None:
    made = holder()
    made.say(replica(), reply_to="t")
    made.say(room())
    (asked,) = only(made.say(pull(0, lease="m1.4"), reply_to="t"), PullIntoEngine)
    assert asked.lease == "m1.4"


@pytest.mark.parametrize(
    ("proven", "known", "blocks"),
    [
        (2, 2 * INFO.block_size + 5, 2),
        (1, 2 * INFO.block_size + 5, 1),
        (2, 2 * INFO.block_size, 1),  # the last token is computed, for its logits
        (2, INFO.block_size + 1, 1),  # the source had decoded more than ingress knows
    ],
)
def test_a_continuation_gets_what_is_proven_and_known(proven: int, known: int, blocks: int) -> None:
    made = held(proven=proven)
    (added,) = only(continued(made, known=known), AddToEngine)
    handover = added.sequence.handover
    assert handover.migration == "m1"
    assert handover.computed_tokens == blocks * INFO.block_size
    assert not handover.blocks, "nothing is left to read: its source is gone"


def test_ingress_hears_how_much_was_there() -> None:
    made = held()
    continued(made)
    tokens = 2 * INFO.block_size
    (accepted,) = bodies(made.say(SequenceAdded(sequence="r1.0", kv_tokens=tokens)), SequenceAccepted)
    assert accepted.kv_tokens == tokens
    assert made.actor.snapshot()["figures"]["replicas_missed"] == 0


def test_without_the_replica_everything_is_computed_and_counted() -> None:
    made = holder()
    (added,) = only(continued(made), AddToEngine)
    assert added.sequence.handover is None
    made.say(SequenceAdded(sequence="r1.0"))
    assert made.actor.snapshot()["figures"]["replicas_missed"] == 1


@pytest.mark.parametrize(
    "fields", [{"sequence": "r2.0"}, {"epoch": 3, "output_token_ids": [1] * 4, "handover": HANDOVER, "replica": ""}]
)
def test_another_sequence_or_a_migration_gets_nothing_of_a_replica(fields: dict[str, Any]) -> None:
    (added,) = only(continued(held(), **fields), AddToEngine)
    assert added.sequence.handover is None


def test_nothing_proven_frees_it_and_computes_everything() -> None:
    made = holder()
    made.say(replica(), reply_to="t")
    effects = continued(made)
    assert only(effects, UnreserveInEngine)
    assert only(effects, AddToEngine)[0].sequence.handover is None


@pytest.mark.parametrize(("epoch", "freed"), [(2, False), (3, True), (9, True)])
def test_ingress_frees_it_by_a_cancel_up_to_its_epoch(epoch: int, freed: bool) -> None:
    made = held()
    effects = made.say(CancelSequence(sequence="r1.0", epoch=epoch))
    assert bool(only(effects, UnreserveInEngine)) is freed


def test_a_cancel_of_the_earlier_epoch_leaves_the_continuation_alone() -> None:
    made = held()
    continued(made)
    made.say(CancelSequence(sequence="r1.0", epoch=3))
    assert made.actor.ledger.get("r1.0") is not None


def test_without_news_it_ends_after_its_time() -> None:
    made = held()
    assert not only(made.say(TimerFired(name="reserve/m1"), after_ms=3_000), UnreserveInEngine)
    made.say(PullKv(migration="m1", from_block=2, blocks=[], read_ms=0, proven=2), reply_to="t")
    assert not only(made.say(TimerFired(name="reserve/m1"), after_ms=4_000), UnreserveInEngine)
    assert only(made.say(TimerFired(name="reserve/m1"), after_ms=1_100), UnreserveInEngine)
    assert made.actor.snapshot()["figures"]["replicas_expired"] == 1


def test_one_that_the_engine_gave_up_is_forgotten() -> None:
    made = held()
    made.say(pull(2), reply_to="t")
    (no,) = bodies(made.say(denied(KvRefusal.INVALID)), KvRefused)
    assert no.reason is KvRefusal.INVALID
    figures = made.actor.snapshot()["figures"]
    assert figures["replicas_yielded"] == 1
    assert not made.actor.snapshot()["reservations"]


def test_a_read_that_failed_leaves_what_was_proven() -> None:
    made = held()
    made.say(pull(2), reply_to="t")
    made.say(denied(KvRefusal.COPY_FAILED))
    (added,) = only(continued(made, known=50), AddToEngine)
    assert added.sequence.handover.computed_tokens == 2 * INFO.block_size
