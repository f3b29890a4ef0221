"""A request that an engine was lost with is given to no second one, unless alone; nobody waits for one that hangs."""

import pytest
from millrace.contracts.ingress import FinishReason
from millrace.contracts.local import RequestFailure, TimerFired
from millrace.contracts.observers import DecisionMade
from millrace.contracts.worker import CancelSequence, Images, Sampling, StructuredOutput

from services.ingress.calls.messages import CallAbandoned, FailCall, RefusalKind, RefuseCall
from services.ingress.failover.instance_loss import SUSPECTS_MAX
from tests.unit.ingress_core import MILLISECOND, SECOND, Bench, chunk, instance_of


def sent_to(bench: Bench, request: str) -> list[str]:
    """The instances that a request was submitted to, in order."""
    return [instance_of(s) for s in bench.submissions() if s.body.sequence == f"{request}.0"]


def bench_with_neighbour(instances: int = 2) -> tuple[Bench, str, str]:
    """A stream that has tokens, and a request that has none, on one instance; and the name of another one."""
    bench = Bench(instances=instances)
    home = bench.run_call("stream")
    bench.tokens(home, chunk("ab", sequence="stream.0"))
    busy(bench, home)
    assert bench.run_call("bad") == home
    return bench, home, min(bench.summary_at.keys() - {home})


def busy(bench: Bench, home: str) -> None:
    """All other instances have so much work that the next request goes there."""
    for other in bench.summary_at.keys() - {home}:
        bench.summary(other, running=50, waiting=50, running_tokens=5000, waiting_prefill_tokens=5000)


def pass_busy(bench: Bench, seconds: float, *alive: str, idle: str = "") -> None:
    """Time in which these instances live, with work of others, and one without."""
    for _ in range(int(seconds * 4)):
        bench.now_ns += 250 * MILLISECOND
        for name, counts in zip(alive, ({"running": 3}, {"waiting": 3}), strict=False):
            bench.summary(name, **counts)
        if idle:
            bench.summary(idle)
        for timer in bench.due():
            bench.send(TimerFired(name=timer))


def give_back(bench: Bench, instance: str) -> None:
    """Its engine died, not its worker, which then ends."""
    bench.engine_dies(instance)
    bench.die(instance)


def test_a_silent_instance_keeps_its_suspect_and_the_stream_beside_it_goes_on_elsewhere():
    bench, home, other = bench_with_neighbour()
    pass_busy(bench, 3, other)
    assert sent_to(bench, "stream") == [home, other]
    assert sent_to(bench, "bad") == [home]
    assert not [c for c in bench.sent(CancelSequence) if c.sequence == "bad.0"]
    bench.summary(home)
    assert not bench.actor.state.sequences["bad.0"].retry.suspect
    bench.tokens(home, chunk("a", sequence="bad.0"))
    pass_busy(bench, 9, home, other)
    assert sent_to(bench, "bad") == [home], "it was cleared, and went on"


def test_a_suspect_of_an_instance_that_stays_silent_is_tried_alone_or_refused():
    bench, home, _ = bench_with_neighbour(3)
    others = sorted(bench.summary_at.keys() - {home})
    pass_busy(bench, 8, *others)
    assert sent_to(bench, "bad") == [home], "nobody is idle"
    bench.summary(others[1])
    assert bench.run_call("late") == others[0], "it is left to the suspect"
    pass_busy(bench, 2, others[0], idle=others[1])
    assert sent_to(bench, "bad") == [home, others[1]]
    bench.tokens(others[1], chunk("", sequence="bad.0", epoch=1, finish=FinishReason.CANCELLED))
    assert not bench.made(FailCall), "it was handed back, not lost"


def test_a_suspect_that_left_a_silent_instance_is_none_once_that_is_heard_again():
    bench, home, other = bench_with_neighbour()
    pass_busy(bench, 8, other)
    assert sent_to(bench, "bad") == [home]
    bench.summary(home, running=3)
    assert len(sent_to(bench, "bad")) == 2


def test_a_suspect_that_nobody_can_take_alone_is_refused_and_says_why():
    bench, home, other = bench_with_neighbour()
    pass_busy(bench, 130, other)
    (failed,) = bench.made(FailCall)
    assert (failed.request, failed.kind) == ("bad", RefusalKind.CONTINUATION_FAILED)
    assert "not tried again beside others" in failed.detail
    assert sent_to(bench, "bad") == [home]


def test_a_suspect_of_a_dead_instance_waits_for_its_return_and_is_refused_with_the_next_death():
    bench, home, other = bench_with_neighbour()
    bench.die(home)
    assert sent_to(bench, "stream") == [home, other], "at once"
    pass_busy(bench, 2, other)
    assert sent_to(bench, "bad") == [home]
    bench.come_back(home)
    pass_busy(bench, 1, other)
    assert sent_to(bench, "bad") == [home, home]
    assert bench.run_call("late") == other, "it is alone there"
    bench.die(home)
    (failed,) = bench.made(FailCall)
    assert (failed.request, failed.kind) == ("bad", RefusalKind.AT_FAULT)
    assert sent_to(bench, "bad") == [home, home]


def test_an_engine_that_comes_back_under_load_takes_its_suspects_one_after_the_other_and_then_others():
    bench, home, other = bench_with_neighbour()
    assert bench.run_call("worse") == home

    def work(seconds: float, running: int) -> None:
        for _ in range(int(4 * seconds)):
            bench.summary(home, running=running, running_tokens=50 * running)
            pass_busy(bench, 0.25, other)

    give_back(bench, home)
    pass_busy(bench, 1, other)
    bench.come_back(home)
    pass_busy(bench, 1, other)
    tried: list[str] = []
    for running in (1, 2):
        (name,) = (n for n in ("bad", "worse") if n not in tried and sent_to(bench, n) == [home, home])
        busy(bench, home)
        assert bench.run_call(f"beside {name}") == other, "what stays at home is left to suspects"
        bench.accept(next(s for s in reversed(bench.submissions()) if s.body.sequence == f"{name}.0"))
        work(3, running)
        bench.tokens(home, chunk("a", sequence=f"{name}.0", epoch=1))
        tried.append(name)
        busy(bench, home)
        assert bench.run_call(f"after {name}") == (other if running == 1 else home), "a suspect waits, then none"
        work(1, running)
    assert not bench.made(FailCall)


def test_a_trial_whose_client_leaves_holds_up_no_other_suspect():
    bench, home, other = bench_with_neighbour()
    assert bench.run_call("worse") == home
    give_back(bench, home)
    bench.come_back(home)
    pass_busy(bench, 2, other, idle=home)
    (tried,) = (name for name in ("bad", "worse") if sent_to(bench, name) == [home, home])
    bench.send(CallAbandoned(request=tried, reason="client_gone"))
    pass_busy(bench, 2, other, idle=home)
    assert sent_to(bench, "bad") == sent_to(bench, "worse") == [home, home]


@pytest.mark.parametrize("idle", [True, False])
def test_a_stream_that_lost_two_engines_takes_any_if_none_is_idle_and_waits_a_second_for_anothers_trial(idle: bool):
    bench = Bench(instances=3)
    home = bench.run_call("a")
    for name in "abc":
        busy(bench, home)
        assert name == "a" or bench.run_call(name) == home
        bench.tokens(home, chunk("ab", sequence=f"{name}.0"))
        bench.actor.state.sequences[f"{name}.0"].retry.deaths = 1
    first, other = sorted(bench.summary_at.keys() - {home})
    bench.summary(first, running=0 if idle else 3)
    bench.die(home)
    assert sent_to(bench, "a") == [home, first]
    assert bench.run_call("late") == (other if idle else first), "its trial stays alone where it began alone"
    bench.summary(other)
    bench.actor.state.trials_due_ns["another model"] = bench.now_ns + SECOND
    assert bench.run_call("later") == other, "nothing is kept free for streams, or for those of other models"
    pass_busy(bench, 0.75, other, idle=first)
    assert sent_to(bench, "b") == [home] or not idle
    pass_busy(bench, 0.75, other, idle=first)
    assert [len(sent_to(bench, name)) for name in "bc"] == [2, 2]


def test_a_trial_that_others_joined_holds_up_no_other_suspect():
    bench, home, other = bench_with_neighbour()
    assert bench.run_call("worse") == home
    give_back(bench, home)
    pass_busy(bench, 1, other)
    bench.come_back(home)
    pass_busy(bench, 1, other)
    (waiting,) = (name for name in ("bad", "worse") if sent_to(bench, name) == [home])
    bench.accept()
    bench.accept(next(s for s in bench.submissions() if s.body.sequence == "stream.0" and s.body.epoch == 1))
    bench.tokens(other, chunk("c", 2, sequence="stream.0", epoch=1))
    give_back(bench, other)
    assert sent_to(bench, "stream")[-1] == home, "there is no other"
    bench.come_back(other)
    pass_busy(bench, 4, home, idle=other)
    assert sent_to(bench, waiting) == [home, other]
    give_back(bench, home)
    assert not bench.made(FailCall), "what was there beside others is not to blame"


@pytest.mark.parametrize(("answered", "restarts"), [(True, False), (False, False), (True, True)])
def test_a_suspect_of_a_process_that_ended_is_tried_beside_others_where_no_instance_gets_idle(answered, restarts):
    bench = Bench(instances=2)
    bench.call("bad")
    (home,), (other,) = sent_to(bench, "bad"), bench.summary_at.keys() - set(sent_to(bench, "bad"))
    if answered:
        bench.accept()
    pass_busy(bench, 3.5, home, other)
    if restarts:
        bench.incarnations[home] += 1
        bench.summary(home, running=3)
    else:
        bench.die(home)
    alive = (home, other) if restarts else (other,)
    pass_busy(bench, 3.75, *alive)
    assert sent_to(bench, "bad") == [home]
    pass_busy(bench, 2, *alive)
    assert len(sent_to(bench, "bad")) == 2
    for name in alive:
        bench.die(name)
    bench.pass_time(30, alive=())
    assert not bench.made(FailCall) + bench.made(RefuseCall), "it waits as long as what had been answered"


def test_a_suspect_that_holds_its_instance_up_in_its_trial_is_refused():
    bench, home, _ = bench_with_neighbour(3)
    others = sorted(bench.summary_at.keys() - {home})
    bench.die(home)
    pass_busy(bench, 2, others[0], idle=others[1])
    bench.accept()
    assert sent_to(bench, "bad") == [home, others[1]]
    pass_busy(bench, 8, others[0])
    (failed,) = bench.made(FailCall)
    assert (failed.request, failed.kind) == ("bad", RefusalKind.AT_FAULT)
    assert sent_to(bench, "bad") == [home, others[1]]


def test_a_worker_that_does_not_answer_and_gives_no_sign_is_asked_again_and_nobody_else():
    bench = Bench()
    bench.now_ns += MILLISECOND
    bench.call("bad")
    request, home = bench.last_submission()
    (other,) = bench.summary_at.keys() - {home}
    pass_busy(bench, 1, other)
    bench.fail(request, RequestFailure.TIMEOUT)
    assert sent_to(bench, "bad") == [home, home]
    assert [s.body.epoch for s in bench.submissions()] == [0, 0]
    assert not bench.sent(CancelSequence)
    pass_busy(bench, 1, other)
    bench.summary(home)
    bench.accept(bench.submissions()[-1])
    bench.tokens(home, chunk("a", sequence="bad.0"))
    assert sent_to(bench, "bad") == [home, home]


def test_an_output_constraint_gives_the_worker_time_to_try_it():
    bench = Bench()
    bench.call("plain")
    bench.call("bound", sampling=Sampling(max_tokens=4, structured=StructuredOutput(regex="a")))
    plain, bound = (s.timeout_ns for s in bench.submissions())
    assert bound == plain + 5 * SECOND


def test_only_the_last_to_come_are_suspects_and_all_others_fail_over_at_once():
    bench, home, _ = bench_with_neighbour()
    for number in range(20):
        busy(bench, home)
        bench.now_ns += MILLISECOND
        assert bench.run_call(f"r{number}") == home
    bench.die(home)
    held = [f"r{number}" for number in range(20) if sent_to(bench, f"r{number}") == [home]]
    assert held == [f"r{number}" for number in range(20 - SUSPECTS_MAX, 20)]
    assert len(sent_to(bench, "bad")) == 2


@pytest.mark.parametrize(
    "read_at_once",
    [{"structured": StructuredOutput(regex="a")}, {"images": Images(data=[b"png"], prompt=[1], digest="d")}],
    ids=["constraint", "images"],
)
def test_what_waited_behind_a_full_batch_is_no_suspect_but_for_the_next_and_what_the_engine_reads_at_once(read_at_once):
    bench, home, other = bench_with_neighbour()
    bench.register(home, max_sequences=2)
    for number in range(6):
        busy(bench, home)
        bench.now_ns += MILLISECOND
        sampling = Sampling(max_tokens=4, **(read_at_once if number == 2 else {}))
        assert bench.run_call(f"r{number}", sampling=sampling) == home
    bench.tokens(home, chunk("a", sequence="bad.0"))
    bench.summary(other)
    bench.die(home)
    held = [name for name in ("stream", "bad", *(f"r{n}" for n in range(6))) if sent_to(bench, name) == [home]]
    assert held == ["r0", "r2", "r5"]


def test_what_came_after_the_last_sign_of_life_is_no_suspect():
    bench, home, other = bench_with_neighbour()
    pass_busy(bench, 1, other)
    bench.summary(other, running=50, waiting=50, running_tokens=5000, waiting_prefill_tokens=5000)
    assert bench.run_call("late") == home
    pass_busy(bench, 1, other)
    assert sent_to(bench, "late") == [home, other]
    assert sent_to(bench, "bad") == [home]


# An engine that hangs under a worker that still publishes summaries: nobody is sent there, and nobody waits there.


def hang(bench: Bench, instance: str, seconds: float, *, from_s: float = 0.0) -> None:
    """The engine of an instance gives no sign of life; summaries of all come every 250 ms."""
    passed = from_s
    while passed < from_s + seconds:
        passed = round(passed + 0.25, 2)
        others = tuple(name for name in bench.summary_at if name != instance)
        bench.now_ns += 250 * MILLISECOND
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
        bench.now_ns += MILLISECOND
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
