"""Poison requests: one that makes engines fail is refused; those that were beside it go on."""

import pytest
from millrace.contracts.ingress import FinishReason

from services.ingress.calls.messages import FailCall, RefusalKind
from services.ingress.config import ContinuationConfig, IngressConfig
from tests.unit.ingress_core import NO_TAG, PLAIN, Bench, chunk


@pytest.mark.parametrize(
    ("second", "failed", "tries"), [(FinishReason.ERROR, [RefusalKind.AT_FAULT], 2), (FinishReason.CANCELLED, [], 3)]
)
def test_an_error_on_two_engines_is_the_requests_fault_and_an_error_and_a_cancellation_are_not(second, failed, tries):
    bench = Bench(instances=4)
    bench.run_call()
    for epoch, finish in enumerate((FinishReason.ERROR, second)):
        request, instance = bench.last_submission()
        if epoch:
            bench.accept(request)
        assert request.body.epoch == epoch
        bench.tokens(instance, chunk("", epoch=epoch, finish=finish))
    bench.pass_time(0.5)
    assert [each.kind for each in bench.made(FailCall)] == failed
    assert all("2 engines ended this request with an error" in each.detail for each in bench.made(FailCall))
    assert len(bench.submissions()) == tries


def test_an_error_with_an_output_constraint_is_the_constraints_fault_and_no_second_engine_is_asked():
    bench = Bench(instances=4)
    instance = bench.run_call(constraint_param="response_format")
    bench.tokens(instance, chunk("", finish=FinishReason.ERROR))
    (failed,) = bench.made(FailCall)
    assert (failed.kind, failed.param) == (RefusalKind.AT_FAULT, "response_format")
    assert ("(`response_format`)" in failed.detail, len(bench.submissions())) == (True, 1)


def die(bench: Bench, instance: str, how: str) -> None:
    """The engine dies; a new incarnation comes up at once."""
    if how == "returned":
        bench.engine_dies(instance)
    elif how == "dead":
        bench.die(instance)
    bench.come_back(instance)


def accept_all(bench: Bench) -> None:
    for request in bench.submissions():
        if request.correlation in bench.actor.state.pending:
            bench.accept(request)


@pytest.mark.parametrize("how", ["dead", "restarted", "returned"])
def test_a_request_that_was_there_when_two_engines_died_is_refused(how: str):
    bench = Bench(IngressConfig(tagging=NO_TAG, dispatch=PLAIN, continuation=ContinuationConfig(fruitless_max=20)))
    bench.run_call("bad")
    for _ in range(2):
        assert not bench.made(FailCall)
        accept_all(bench)
        _, instance = bench.last_submission()
        die(bench, instance, how)
        bench.pass_time(1)
    (failed,) = bench.made(FailCall)
    assert (failed.kind, failed.param) == (RefusalKind.AT_FAULT, "")
    assert failed.detail.startswith("2 engines in a row died")
    assert len(bench.submissions()) == 2


def test_a_stream_that_has_a_token_between_deaths_is_neither_at_fault_nor_given_up():
    config = ContinuationConfig(fruitless_max=2)
    bench = Bench(IngressConfig(tagging=NO_TAG, dispatch=PLAIN, continuation=config), instances=3)
    bench.run_call()
    for number in range(12):
        accept_all(bench)
        request, instance = bench.last_submission()
        bench.tokens(instance, chunk("a", number, epoch=request.body.epoch))
        die(bench, instance, "dead")
        bench.pass_time(1)
    assert not bench.made(FailCall)
    assert bench.text() == "a" * 12
