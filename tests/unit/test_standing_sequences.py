"""Sequences of an engine whose KV cannot move stand still for everybody else."""

from millrace.actor.engine import (
    EndLeaseInEngine,
    EngineSequence,
    FreezeInEngine,
    KvDenied,
    KvLeaseTaken,
    LeaseInEngine,
    PullIntoEngine,
    SequenceStopped,
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


def reason(said: KvLeaseTaken | SequenceStopped | KvDenied) -> KvRefusal:
    return said.reason


def test_a_lease_and_a_freeze_tell_every_token_and_no_block() -> None:
    made = standing(2, 3)
    leased, stopped = made.ask(LEASE, 5), made.ask(FREEZE, 5)
    assert (leased.blocks, leased.prompt_tokens, leased.output_tokens, leased.computed_tokens) == ([], 2, 3, 4)
    assert (stopped.blocks, stopped.output_token_ids) == ([], [1, 2, 3])


def test_what_comes_after_a_freeze_is_told_in_order_where_the_sequence_stays() -> None:
    made = standing(2)
    made.ask(LEASE, 5)
    made.ask(FREEZE, 5)
    last = [out(3), out(4, finish=FinishReason.LENGTH)]
    assert [made.take(each) for each in last] == [None, None]
    assert made.ask(FREEZE, 5).output_token_ids == [1, 2]  # type: ignore[union-attr]
    assert made.end(EndLeaseInEngine(migration="m", moved=False)) == ("r1.0", last)
    assert reason(made.ask(LEASE, 5)) is KvRefusal.UNKNOWN_SEQUENCE


def test_what_comes_after_a_freeze_is_dropped_where_the_sequence_has_gone() -> None:
    made = standing(2)
    made.ask(LEASE, 5)
    made.ask(FREEZE, 5)
    assert made.take(out(3)) is None
    assert made.end(EndLeaseInEngine(migration="m", moved=True)) == ("r1.0", [])


def test_what_cannot_be_had_is_denied() -> None:
    made = standing()
    pull = PullIntoEngine(migration="m", from_block=0, blocks=[], checksums=[], until_ns=0, lease="")
    assert reason(made.ask(pull, 5)) is KvRefusal.UNABLE
    assert reason(made.ask(FREEZE, 5)) is KvRefusal.LEASE_LOST
    made.forget("r1.0")
    assert reason(made.ask(LEASE, 5)) is KvRefusal.UNKNOWN_SEQUENCE
    assert made.end(EndLeaseInEngine(migration="other", moved=True)) == ("", [])
    assert made.take(out(5)) == out(5)
