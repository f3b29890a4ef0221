"""KV replicas at ingress: who is told of them, who continues on them, and when they are freed."""

import pytest
from millrace.actor.effects import Log, Request
from millrace.contracts.ingress import FinishReason
from millrace.contracts.migration import KvReplicated
from millrace.contracts.worker import RefusalReason, SequenceAccepted, SequenceRefused, SubmitSequence

from tests.unit.ingress_core import chunk, instance_of
from tests.unit.ingress_moving import MoveBench


def replicated(bench: MoveBench, **changes: object) -> KvReplicated:
    fields = {
        "sequence": "r.0",
        "epoch": 0,
        "replica": "m",
        "instance": bench.target,
        "incarnation": bench.incarnations[bench.target],
        "tokens": 32,
    }
    return KvReplicated(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture
def bench() -> MoveBench:
    """A call with three tokens from its source, and a replica at the target."""
    made = MoveBench()
    made.tokens(made.source, chunk("abc"))
    made.send(replicated(made))
    return made


def submission(bench: MoveBench) -> tuple[str, SubmitSequence]:
    request: Request = bench.submissions()[-1]
    assert isinstance(request.body, SubmitSequence)
    return instance_of(request), request.body


def test_a_continuation_goes_to_the_holder_and_names_the_replica(bench: MoveBench):
    bench.die(bench.source)
    instance, body = submission(bench)
    assert instance == bench.target
    assert body.replica == "m"
    assert body.epoch == 1
    assert bench.cancels() == [(bench.source, 0)], "the replica is not freed"


def test_what_the_holder_had_is_counted_and_logged(bench: MoveBench):
    bench.die(bench.source)
    request = bench.submissions()[-1]
    effects = bench.reply(request, SequenceAccepted(sequence="r.0", epoch=1, kv_tokens=2))
    (line,) = [e for e in effects if isinstance(e, Log) and e.event == "continued_on_replica"]
    assert line.fields["kv_tokens"] == 2
    metrics = bench.metrics
    assert (metrics.replica_continuations, metrics.replica_tokens) == (1, 2)
    assert metrics.replica_tail_tokens == line.fields["tokens"] - 2


def test_a_replica_is_named_once(bench: MoveBench):
    bench.die(bench.source)
    bench.accept(bench.submissions()[-1])
    bench.tokens(bench.target, chunk("d", 3, epoch=1))
    bench.die(bench.target)
    instance, body = submission(bench)
    assert instance == bench.third
    assert body.replica == ""


def test_one_of_another_epoch_is_freed_and_not_used(bench: MoveBench):
    made = MoveBench()
    made.tokens(made.source, chunk("abc"))
    made.send(replicated(made, epoch=7))
    assert made.cancels() == [(made.target, 7)]
    made.die(made.source)
    assert submission(made)[1].replica == ""


def test_a_holder_that_restarted_is_no_holder(bench: MoveBench):
    bench.incarnations[bench.target] += 1
    bench.register(bench.target)
    bench.summary(bench.target)
    bench.die(bench.source)
    assert submission(bench)[1].replica == "" or submission(bench)[0] != bench.target


def test_a_later_replica_replaces_the_earlier_which_is_freed(bench: MoveBench):
    later = replicated(bench, replica="n", instance=bench.third, incarnation=bench.incarnations[bench.third])
    bench.send(later)
    assert bench.cancels() == [(bench.target, 0)]
    bench.die(bench.source)
    instance, body = submission(bench)
    assert (instance, body.replica) == (bench.third, "n")


def test_a_replica_that_is_gone_is_not_named(bench: MoveBench):
    bench.send(replicated(bench, tokens=0))
    bench.die(bench.source)
    assert submission(bench)[1].replica == ""


def test_where_the_holder_died_too_any_instance_continues(bench: MoveBench):
    bench.die(bench.target)
    bench.die(bench.source)
    instance, body = submission(bench)
    assert (instance, body.replica) == (bench.third, "")


def test_a_holder_that_refuses_is_left_for_another(bench: MoveBench):
    bench.die(bench.source)
    refused = SequenceRefused(sequence="r.0", epoch=1, reason=RefusalReason.FULL)
    bench.reply(bench.submissions()[-1], refused)
    instance, body = submission(bench)
    assert (instance, body.replica) == (bench.third, "")


def test_the_end_of_a_sequence_frees_its_replica(bench: MoveBench):
    bench.tokens(bench.source, chunk("d", 3, finish=FinishReason.STOP))
    assert (bench.target, 0) in bench.cancels()


def test_a_move_frees_the_replica_of_the_earlier_epoch(bench: MoveBench):
    assert bench.allot(target=bench.third) == 1
    bench.moved(3, epoch=1, instance=bench.third)
    assert bench.owner == (bench.third, 1)
    assert (bench.target, 0) in bench.cancels()
    bench.die(bench.third)
    assert submission(bench)[1].replica == ""


def test_one_of_an_unknown_sequence_is_freed():
    made = MoveBench()
    made.send(replicated(made, sequence="gone.0"))
    assert made.cancels() == [(made.target, 0)]
