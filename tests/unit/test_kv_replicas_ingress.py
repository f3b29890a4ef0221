"""KV replicas at ingress: who is told of them, who continues on them, and when they are freed."""

import pytest
from millrace.actor.effects import Log
from millrace.contracts.ingress import FinishReason
from millrace.contracts.migration import KvReplicated
from millrace.contracts.worker import RefusalReason, SequenceAccepted, SequenceRefused

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


def submission(bench: MoveBench) -> tuple[str, str]:
    """Instance of the last submission, and the replica that it names."""
    request = bench.submissions()[-1]
    return instance_of(request), request.body.replica


def test_a_continuation_goes_to_the_holder_names_the_replica_and_is_counted(bench: MoveBench):
    bench.die(bench.source)
    assert submission(bench) == (bench.target, "m")
    assert bench.cancels() == [(bench.source, 0)], "the replica is not freed"
    effects = bench.reply(bench.submissions()[-1], SequenceAccepted(sequence="r.0", epoch=1, kv_tokens=2))
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
    assert submission(bench) == (bench.third, "")


@pytest.mark.parametrize(("changes", "epoch"), [({"epoch": 7}, 7), ({"sequence": "gone.0"}, 0)])
def test_one_of_another_epoch_or_an_unknown_sequence_is_freed_and_not_used(changes: dict[str, object], epoch: int):
    made = MoveBench()
    made.tokens(made.source, chunk("abc"))
    made.send(replicated(made, **changes))
    assert made.cancels() == [(made.target, epoch)]
    made.die(made.source)
    assert submission(made)[1] == ""


def restarted(bench: MoveBench) -> None:
    bench.incarnations[bench.target] += 1
    bench.register(bench.target)
    bench.summary(bench.target)


@pytest.mark.parametrize(
    "lost", [restarted, lambda bench: bench.die(bench.target), lambda bench: bench.send(replicated(bench, tokens=0))]
)
def test_one_that_is_gone_or_whose_holder_restarted_or_died_is_not_named(bench: MoveBench, lost):
    lost(bench)
    bench.die(bench.source)
    assert submission(bench)[1] == ""


def test_a_later_replica_replaces_the_earlier_which_is_freed(bench: MoveBench):
    bench.send(replicated(bench, replica="n", instance=bench.third, incarnation=bench.incarnations[bench.third]))
    assert bench.cancels() == [(bench.target, 0)]
    bench.die(bench.source)
    assert submission(bench) == (bench.third, "n")


def test_a_holder_that_refuses_is_left_for_another(bench: MoveBench):
    bench.die(bench.source)
    bench.reply(bench.submissions()[-1], SequenceRefused(sequence="r.0", epoch=1, reason=RefusalReason.FULL))
    assert submission(bench) == (bench.third, "")


def test_the_end_of_a_sequence_frees_its_replica(bench: MoveBench):
    bench.tokens(bench.source, chunk("d", 3, finish=FinishReason.STOP))
    assert (bench.target, 0) in bench.cancels()


def test_a_move_frees_the_replica_of_the_earlier_epoch(bench: MoveBench):
    assert bench.allot(target=bench.third) == 1
    bench.moved(3, epoch=1, instance=bench.third)
    assert bench.owner == (bench.third, 1)
    assert (bench.target, 0) in bench.cancels()
    bench.die(bench.third)
    assert submission(bench)[1] == ""
