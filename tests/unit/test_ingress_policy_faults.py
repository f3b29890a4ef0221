"""A dispatch policy that raises: the fallback decides, the fault is counted and its file and line are logged."""

from pathlib import Path

import pytest
from millrace.actor.effects import Log
from millrace.contracts.observers import DecisionMade

from services.ingress.config import DispatchConfig, IngressConfig
from tests.unit.ingress_core import NO_TAG, Bench

RAISES = """
def decide(view, parameters, state, now_ns, rng):
    return _half(view), state


def _half(view):
    return view.candidates[0].running / 0
"""
NO_DECISION = "def decide(view, parameters, state, now_ns, rng):\n    return None\n"
STRANGER = """
from millrace.policies.dispatch import Decision
def decide(view, parameters, state, now_ns, rng):
    return Decision("w99", "a guess", []), state
"""
ASK_RAISES = """
from millrace.policies.dispatch import QueryParameters
class Parameters(QueryParameters, frozen=True, kw_only=True):
    fallback: str = "round_robin"
def ask(view, parameters, rng):
    raise KeyError("nobody")
def decide(view, parameters, state, now_ns, rng):
    raise LookupError("no prediction")
"""


def bench_with(source: str, folder: Path) -> Bench:
    file = folder / "own.py"
    file.write_text(source)
    return Bench(IngressConfig(tagging=NO_TAG, dispatch=DispatchConfig(policy=str(file))))


@pytest.mark.parametrize(
    ("source", "line", "error"),
    [
        (RAISES, 7, "ZeroDivisionError: division by zero"),
        (NO_DECISION, 1, "TypeError: cannot unpack non-iterable NoneType object"),
        (STRANGER, 3, "decide chose 'w99', which is no candidate"),
    ],
)
def test_the_fallback_decides_and_the_place_is_logged_once(source: str, line: int, error: str, tmp_path: Path):
    bench = bench_with(source, tmp_path)
    for request in "abc":
        bench.run_call(request)
    assert len(bench.submissions()) == 3
    assert {d.fallback for d in bench.sent(DecisionMade)} == {"join_shortest_queue"}
    assert all(d.reason.startswith("own failed; join_shortest_queue: ") for d in bench.sent(DecisionMade))
    assert bench.metrics.policy_faults.counts == {("own",): 3}
    assert bench.metrics.fallbacks.counts == {("policy_failed",): 3}
    [log] = [e for e in bench.made(Log) if e.event == "policy_failed"]
    assert (log.level, log.fields["policy"], log.fields["error"]) == ("error", "own", error)
    assert log.fields["where"] == f"{tmp_path / 'own.py'}:{line}"


def test_a_policy_whose_ask_raises_has_its_own_fallback(tmp_path: Path):
    bench = bench_with(ASK_RAISES, tmp_path)
    bench.run_call()
    [decision] = bench.sent(DecisionMade)
    assert decision.fallback == "round_robin"
    places = [e.fields["where"] for e in bench.made(Log) if e.event == "policy_failed"]
    assert places == [f"{tmp_path / 'own.py'}:6", f"{tmp_path / 'own.py'}:8"]
