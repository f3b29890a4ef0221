"""Sequences of an engine whose KV cannot move stand still for everybody else."""

import pytest
from millrace.actor.engine import (
    EndLeaseInEngine,
    EngineSequence,
    FreezeInEngine,
    LeaseInEngine,
    PullIntoEngine,
    StepOutput,
)
from millrace.contracts.ingress import FinishReason
from millrace.contracts.kv import KvRefusal
from millrace.contracts.worker import Sampling

from services.worker.vllm_engine.standing import StandingSequences

LEASE = LeaseInEngine(migration="m", sequence="r1.0", from_block=0)
FREEZE = FreezeInEngine(migration="m", sequence="r1.0", from_block=0)


def standing(*tokens: int) -> StandingSequences:
    made = StandingSequences()
    sampling = Sampling(max_tokens=9, temperature=0.0)
    made.follow(EngineSequence(sequence="r1.0", prompt_token_ids=[7, 8], sampling=sampling, output_token_ids=[1]))
    for token in tokens:
        assert made.take(out(token)) is not None
    return made


def out(*tokens: int, finish: FinishReason | None = None) -> StepOutput:
    return StepOutput(sequence="r1.0", token_ids=list(tokens), finish=finish)


def test_a_lease_and_a_freeze_tell_every_token_and_no_block() -> None:
    made = standing(2, 3)
    leased, stopped = made.ask(LEASE, 5), made.ask(FREEZE, 5)
    assert (leased.blocks, leased.prompt_tokens, leased.output_tokens, leased.computed_tokens) == ([], 2, 3, 4)
    assert (stopped.blocks, stopped.output_token_ids) == ([], [1, 2, 3])


@pytest.mark.parametrize("moved", [False, True])
def test_what_comes_after_a_freeze_is_told_in_order_where_the_sequence_stays_and_else_dropped(moved: bool) -> None:
    made = standing(2)
    made.ask(LEASE, 5)
    made.ask(FREEZE, 5)
    last = [out(3), out(4, finish=FinishReason.LENGTH)]
    assert [made.take(each) for each in last] == [None, None]
    assert made.ask(FREEZE, 5).output_token_ids == [1, 2]
    assert made.end(EndLeaseInEngine(migration="m", moved=moved)) == ("r1.0", [] if moved else last)
    assert moved or made.ask(LEASE, 5).reason is KvRefusal.UNKNOWN_SEQUENCE


def test_what_cannot_be_had_is_denied() -> None:
    made = standing()
    pull = PullIntoEngine(migration="m", from_block=0, blocks=[], checksums=[], until_ns=0, lease="")
    assert made.ask(pull, 5).reason is KvRefusal.UNABLE
    assert made.ask(FREEZE, 5).reason is KvRefusal.LEASE_LOST
    made.forget("r1.0")
    assert made.ask(LEASE, 5).reason is KvRefusal.UNKNOWN_SEQUENCE
    assert made.end(EndLeaseInEngine(migration="other", moved=True)) == ("", [])
    assert made.take(out(5)) == out(5)
