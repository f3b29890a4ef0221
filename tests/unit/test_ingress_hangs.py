"""An engine that hangs under a worker that still publishes summaries: nobody is sent there, and nobody waits there."""

import pytest
from millrace.contracts.local import TimerFired
from millrace.contracts.observers import DecisionMade
from millrace.contracts.worker import CancelSequence

from services.ingress.failover.instance_loss import SUSPECTS_MAX
from tests.unit.ingress_core import MILLISECOND, SECOND, Bench, chunk

MS = MILLISECOND


def hang(bench: Bench, instance: str, seconds: float, *, from_s: float = 0.0) -> None:
    """The engine of an instance gives no sign of life; summaries of all come every 250 ms."""
    passed = from_s
    while passed < from_s + seconds:
        passed = round(passed + 0.25, 2)
        others = tuple(name for name in bench.summary_at if name != instance)
        bench.now_ns += 250 * MS
        for name in others:
            bench.summary(name)
        bench.summary(instance, engine_silent_ns=int(passed * SECOND), running=1)
        for timer in [*bench.due()]:
            bench.send(TimerFired(name=timer))


def usable(bench: Bench, instance: str) -> bool:
    return bool(bench.actor.snapshot()["instances"][instance]["usable"])


def test_a_hung_engine_gets_no_new_sequence_and_its_first_good_sign_ends_that():
    bench = Bench()
    hang(bench, "w0", 0.25)
    assert usable(bench, "w0"), "one late sign is no hang"
    hang(bench, "w0", 0.25, from_s=0.25)
    assert not usable(bench, "w0")
    for number in range(5):
        assert bench.run_call(f"r{number}") == "w1"
    assert bench.actor.snapshot()["instances"]["w0"]["why_not"] == "engine hangs"
    bench.summary("w0")
    assert usable(bench, "w0")


def test_what_waits_there_moves_at_once_a_stream_a_little_later_and_suspects_stay():
    bench = Bench(instances=3)
    stream = bench.run_call("stream")
    bench.tokens(stream, chunk("ab", sequence="stream.0"))
    for other in bench.summary_at.keys() - {stream}:
        bench.summary(other, running=50, waiting=50, running_tokens=5000, waiting_prefill_tokens=5000)
    for name in ("waits", *(f"last{number}" for number in range(SUSPECTS_MAX))):
        assert bench.run_call(name) == stream
        bench.now_ns += MS
    bench.effects.clear()
    hang(bench, stream, 0.5)
    assert [d.request for d in bench.sent(DecisionMade)] == ["waits"]
    assert bench.metrics.continuations.counts == {("instance_hung",): 1}
    hang(bench, stream, 1.0, from_s=0.5)
    assert [d.request for d in bench.sent(DecisionMade)] == ["waits"]
    hang(bench, stream, 0.25, from_s=1.5)
    assert [d.request for d in bench.sent(DecisionMade)] == ["waits", "stream"]
    assert {(c.sequence, c.reason) for c in bench.sent(CancelSequence)} == {
        ("waits.0", "instance_hung"),
        ("stream.0", "instance_hung"),
    }
    assert bench.submissions()[-1].body.output_token_ids == [0, 1]
    bench.summary(stream, running=8)
    for number in range(SUSPECTS_MAX):
        bench.tokens(stream, chunk("a", sequence=f"last{number}.0"))
    assert [d.request for d in bench.sent(DecisionMade)] == ["waits", "stream"]


def test_engines_that_hang_in_turns_do_not_use_up_a_streams_tries():
    """Each for some time, as where machines have too much to do."""
    bench = Bench()
    home = bench.run_call("stream")
    bench.tokens(home, chunk("ab", sequence="stream.0"))
    for _ in range(20):
        hang(bench, home, 2)
        home = next(name for name in bench.summary_at if name != home)
        bench.summaries()
        for submission in bench.submissions():
            if submission.correlation in bench.actor.state.pending:
                bench.accept(submission)
    assert bench.metrics.continuations.counts == {("instance_hung",): 2}
    request, home = bench.last_submission()
    bench.tokens(home, chunk("c", 2, sequence="stream.0", epoch=request.body.epoch))
    assert bench.text("stream") == "abc"


def test_without_another_instance_everything_stays():
    bench = Bench(instances=1)
    bench.run_call("stream")
    bench.tokens("w0", chunk("ab", sequence="stream.0"))
    bench.effects.clear()
    hang(bench, "w0", 5)
    assert not bench.submissions()
    bench.tokens("w0", chunk("c", 2, sequence="stream.0"))
    assert bench.text("stream") == "c"


@pytest.mark.parametrize(
    ("age_s", "longest_s", "used"), [(4.9, 0.0, True), (5.0, 0.0, False), (5.0, 1.0, True), (8.0, 1.0, False)]
)
def test_a_long_step_is_suspect_only_against_the_steps_of_this_engine(age_s: float, longest_s: float, used: bool):
    bench = Bench()
    first = bench.run_call()
    bench.tokens(first, chunk("ab"))
    bench.effects.clear()
    bench.summary(first, step_age_ns=int(age_s * SECOND), step_longest_ns=int(longest_s * SECOND), running=1)
    assert usable(bench, first) is used
    bench.pass_time(2)
    assert not bench.submissions(), "a step that ends some time loses nothing"
