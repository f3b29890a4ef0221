"""LoRA adapters as the cores of worker and ingress know them; in tests/engine/test_lora.py engines load them."""

from typing import Any

import msgspec
import pytest
from millrace.actor.effects import Gather, Publish, PutKey
from millrace.actor.engine import AdapterLoaded, AdapterNotLoaded, LoadInEngine
from millrace.contracts.local import Gathered, KeyChanged
from millrace.contracts.observers import DecisionMade
from millrace.contracts.status import InstanceRecord
from millrace.contracts.worker import Adapter, AdapterChanged, ChangeAdapter, Sampling

from services.ingress.adapters import AdapterAsked, AdapterDone
from services.ingress.config import DispatchConfig, IngressConfig
from tests.testbed.messages import plain_record
from tests.unit import ingress_core, worker_rig
from tests.unit.ingress_core import MODEL, NO_TAG
from tests.unit.worker_rig import INFO, bodies, only

SQL = Adapter(name="sql", path="/a/sql", fingerprint="f1")
OTHER = Adapter(name="sql", path="/b/sql", fingerprint="f2")
TAKING = msgspec.structs.replace(INFO, adapters=[])
WITH_SQL = Sampling(max_tokens=50, adapter=SQL)


# A worker.


def offered(effects: list[Any]) -> list[Adapter] | None:
    return [put.value.adapters for put in only(effects, PutKey)][-1]


def changed(effects: list[Any]) -> AdapterChanged:
    (body,) = bodies(effects, AdapterChanged)
    return body


def test_an_adapter_is_loaded_told_and_unloaded() -> None:
    bench = worker_rig.Bench(TAKING)
    order = ChangeAdapter(name="sql", path="/a/sql")
    (load,) = only(bench.say(order, reply_to="i"), LoadInEngine)
    assert (load.name, load.path) == ("sql", "/a/sql")
    assert not only(bench.say(order, reply_to="j"), LoadInEngine), "it is under way"
    effects = bench.say(AdapterLoaded(adapter=SQL))
    assert offered(effects) == [SQL]
    assert [body.adapter for body in bodies(effects, AdapterChanged)] == [SQL, SQL]
    assert changed(bench.say(order, reply_to="i")).refusal == "", "it is there already"
    effects = bench.say(ChangeAdapter(name="sql"), reply_to="i")
    assert offered(effects) == []
    assert changed(effects).adapter is None


def test_another_adapter_of_a_name_needs_to_be_wanted() -> None:
    bench = worker_rig.Bench(msgspec.structs.replace(INFO, adapters=[SQL]))
    order = ChangeAdapter(name="sql", path="/b/sql")
    assert "/a/sql" in changed(bench.say(order, reply_to="i")).refusal
    bench.say(msgspec.structs.replace(order, replace=True), reply_to="i")
    assert offered(bench.say(AdapterLoaded(adapter=OTHER))) == [OTHER]


def test_what_came_with_a_sequence_is_offered_unless_it_was_unloaded() -> None:
    bench = worker_rig.Bench(TAKING)
    assert offered(bench.say(AdapterLoaded(adapter=SQL))) == [SQL]
    bench.say(ChangeAdapter(name="sql"), reply_to="i")
    assert not only(bench.say(AdapterLoaded(adapter=SQL)), PutKey)


def test_a_load_that_fails_is_told() -> None:
    bench = worker_rig.Bench(TAKING)
    bench.say(ChangeAdapter(name="sql", path="/a/sql"), reply_to="i")
    told = changed(bench.say(AdapterNotLoaded(name="sql", path="/a/sql", detail="No adapter found", missing=True)))
    assert (told.adapter, told.refusal, told.missing) == (None, "No adapter found", True)
    none = worker_rig.Bench()
    assert "no LoRA adapters" in changed(none.say(ChangeAdapter(name="sql", path="/a/sql"), reply_to="i")).refusal


# An ingress.


def ingress(policy: str = "join_shortest_queue", **adapters: list[Adapter] | None) -> ingress_core.Bench:
    """Its instances with the adapters that they tell."""
    dispatch = DispatchConfig(policy=policy)
    bench = ingress_core.Bench(IngressConfig(tagging=NO_TAG, dispatch=dispatch), instances=len(adapters))
    for name, told in adapters.items():
        tell(bench, name, told)
    return bench


def tell(bench: ingress_core.Bench, name: str, adapters: list[Adapter] | None, incarnation: int = 1) -> None:
    record: InstanceRecord = plain_record(name, model=MODEL, adapters=adapters, incarnation=incarnation)
    bench.send(KeyChanged(bucket="instance", key=name, value=record, revision=1))


def known(bench: ingress_core.Bench) -> dict[str, tuple[str, Adapter]]:
    return bench.actor.state.cluster.adapters


def order(bench: ingress_core.Bench, order: ChangeAdapter, *answers: AdapterChanged) -> AdapterDone:
    bench.send(AdapterAsked(request="a", model=MODEL, order=order))
    gathers = [e for e in bench.made(Gather) if e.body == order]
    if gathers:
        bench.send(Gathered(correlation=gathers[-1].correlation, answers=[("", answer) for answer in answers]))
    return bench.made(AdapterDone)[-1]


def test_adapters_are_known_by_records_until_they_are_told_no_longer() -> None:
    bench = ingress(w0=[SQL], w1=[])
    assert known(bench) == {"sql": (MODEL, SQL)}
    tell(bench, "w0", [], incarnation=2)
    assert known(bench), "a restarted instance says nothing about what was loaded before"
    tell(bench, "w1", [SQL])
    tell(bench, "w1", [])
    assert not known(bench)


def test_an_order_goes_to_every_instance_that_takes_adapters() -> None:
    bench = ingress(w0=[], w1=[], w2=None)
    loading = ChangeAdapter(name="sql", path="/a/sql")
    done = order(bench, loading, *(AdapterChanged(instance=name, adapter=SQL) for name in ("w0", "w1")))
    assert [subject.split(".")[-2] for subject in bench.made(Gather)[-1].subjects] == ["w0", "w1"]
    assert not done.refusal
    assert known(bench) == {"sql": (MODEL, SQL)}
    unloading = ChangeAdapter(name="sql")
    assert not order(bench, unloading, *(AdapterChanged(instance=name) for name in ("w0", "w1"))).refusal
    assert not known(bench)


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([AdapterChanged(instance="w1", refusal="No adapter found for /a/sql", missing=True)], "w1: No adapter found"),
        ([], "w1 did not answer"),
        ([AdapterChanged(instance="w1", adapter=OTHER)], "different weights"),
    ],
)
def test_an_adapter_that_not_all_could_load_is_not_offered(answers: list[AdapterChanged], why: str) -> None:
    bench = ingress(w0=[], w1=[])
    done = order(bench, ChangeAdapter(name="sql", path="/a/sql"), AdapterChanged(instance="w0", adapter=SQL), *answers)
    assert why in done.refusal
    assert done.missing == any(answer.missing for answer in answers)
    assert not known(bench)
    assert ChangeAdapter(name="sql") in [e.body for e in bench.made(Publish)]


def test_without_an_instance_that_takes_adapters_the_order_is_refused() -> None:
    nobody = order(ingress(w0=None), ChangeAdapter(name="sql", path="/a/sql"))
    assert "enable_lora" in nobody.refusal
    assert not nobody.taken


def test_sequences_go_where_their_adapter_is() -> None:
    bench = ingress(w0=[], w1=[SQL], w2=None)
    for number in range(3):
        assert bench.run_call(f"r{number}", sampling=WITH_SQL) == "w1"
    bench.summary("w1", running=8)  # its batch is full
    assert bench.run_call("r4", sampling=WITH_SQL) == "w0"


def test_a_forecast_has_the_time_of_a_load_in_it() -> None:
    bench = ingress("forecast", w0=[], w1=[SQL], w2=None)
    bench.call(sampling=WITH_SQL)
    assert [subject.split(".")[-1] for subject in sorted(bench.gather().subjects)] == ["w0", "w1"]
    bench.gathered(bench.predicted("w0", 40), bench.predicted("w1", 50))
    assert bench.last_submission()[1] == "w1"
    times = {forecast.name: forecast.ttft_ns for forecast in bench.sent(DecisionMade)[-1].forecasts}
    assert times == {"w0": 26_000_000, "w1": 1_000_000}


def test_prefixes_are_apart_by_adapter() -> None:
    bench = ingress("forecast", w0=[SQL])
    prompt = list(range(20))
    samplings = [Sampling(max_tokens=5), WITH_SQL, Sampling(max_tokens=5, adapter=OTHER)]
    hashes = set()
    for number, sampling in enumerate(samplings):
        bench.call(f"r{number}", prompts=[prompt], sampling=sampling)
        body = bench.gather().body
        hashes.add(body.block_hashes)
    assert len(hashes) == len(samplings)
    assert b"" not in hashes
