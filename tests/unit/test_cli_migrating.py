"""Output of `millrace migrate` for a migration that did not happen."""

from __future__ import annotations

from millrace.cli.migrate import REFUSALS, told
from millrace.contracts.broker import MoveReason
from millrace.contracts.kv import KvRefusal
from millrace.contracts.migration import MigrationFinished, MigrationOutcome


def test_every_refusal_has_words() -> None:
    assert set(REFUSALS) == set(KvRefusal)


def test_a_refusal_is_told_in_words_with_its_code_and_details() -> None:
    body = MigrationFinished(
        migration="m1",
        sequence="r1.0",
        model="m",
        reason=MoveReason.ORDER,
        epoch=1,
        source="worker-0",
        target="worker-9",
        outcome=MigrationOutcome.REFUSED,
        refusal=KvRefusal.NO_TARGET,
        detail="worker-9 is not registered",
    )
    way = "r1.0 worker-0 → worker-9  refused: no instance can take it"
    assert told(body) == f"{way} (no_target: worker-9 is not registered)"
