"""The log of orders: one line for each, whoever gives it."""

from __future__ import annotations

from typing import Any

from millrace.actor.effects import Subscribe, WatchKeys
from millrace.contracts.cascade import CascadePlan, CascadeTier
from millrace.contracts.catalog import BUCKETS, Role
from millrace.contracts.local import BucketReady, KeyChanged
from millrace.contracts.message import Body, Message
from millrace.contracts.provisioner import StopInstance, UpdateCluster
from millrace.contracts.subjects import Subjects
from millrace.contracts.worker import ChangeAdapter, DrainWorker

from services.supervisor.order_log import ACCEPTS, REPEAT_NS, OrderLog, WriteOrder

SUBJECTS = Subjects("local")


class Bench:
    def __init__(self) -> None:
        self.log = OrderLog("local")
        self.now_ns = 1_800_000_000_000_000_000
        self.started = self.log.start(self.now_ns)

    def heard(self, body: Body, subject: str = "", sender: str = "millrace-cli/ann") -> list[dict[str, Any]]:
        effects = self.log.handle(Message(body, subject, sender), self.now_ns)
        return [{"at_ns": effect.at_ns, **effect.fields} for effect in effects if isinstance(effect, WriteOrder)]


def test_all_that_an_operator_may_order_is_heard():
    heard = {effect.subject for effect in Bench().started if isinstance(effect, Subscribe)}
    drains = {"engine.*.drain", "migrate.*.start", "migrate.*.evacuate"}
    provisions = {"provision.*.start", "provision.*.stop", "provision.*.update"}
    others = {"engine.*.adapter", "coordinate.*.role", "coordinate.*.scale"}
    assert heard == {f"mr.local.{channel}" for channel in drains | provisions | others}
    written = {bucket.name for bucket in BUCKETS if Role.OPERATOR in bucket.writers}
    assert written == {effect.bucket for effect in Bench().started if isinstance(effect, WatchKeys)}


def test_a_line_says_who_ordered_what_and_when():
    bench = Bench()
    body = StopInstance(instance="worker-1", drain_limit_ms=5, operator=True)
    (line,) = bench.heard(body, SUBJECTS.provision("local", "stop"))
    assert line == {
        "at_ns": bench.now_ns,
        "who": "millrace-cli/ann",
        "what": "StopInstance",
        "to": "provision.local.stop",
        "instance": "worker-1",
        "drain_limit_ms": 5,
        "operator": True,
    }


def test_an_order_that_is_told_again_and_again_is_one_line():
    bench = Bench()
    where = SUBJECTS.engine("worker-1", "drain")
    assert bench.heard(DrainWorker(limit_ms=9_000), where, "supervisor")
    for left_ms in (8_000, 7_000, 6_000):
        bench.now_ns += REPEAT_NS // 2
        assert not bench.heard(DrainWorker(limit_ms=left_ms), where, "supervisor")
    assert bench.heard(DrainWorker(limit_ms=6_000), where, "millrace-cli/ann"), "another one orders it too"
    bench.now_ns += REPEAT_NS
    assert bench.heard(DrainWorker(limit_ms=9_000), where, "supervisor")
    first, second = (ChangeAdapter(name=name, path="/a", key="ada") for name in ("sql", "law"))
    told = [bench.heard(first, SUBJECTS.engine(f"worker-{n}", "adapter"), "ingress-0") for n in range(3)]
    assert [len(each) for each in told] == [1, 0, 0]
    assert told[0][0]["key"] == "ada"
    assert bench.heard(second, SUBJECTS.engine("worker-0", "adapter"), "ingress-0")


def test_a_comparison_is_no_order_and_taking_a_file_or_naming_processes_is():
    bench, where = Bench(), SUBJECTS.provision("local", "update")
    assert not bench.heard(UpdateCluster(), where)
    assert not bench.heard(UpdateCluster(wanted=True), where)
    assert bench.heard(UpdateCluster(wanted=True, take=True), where)
    assert bench.heard(UpdateCluster(processes=["ingress-0"]), where)


def test_thresholds_that_an_operator_sets_are_an_order_and_instances_that_change_are_none():
    bench = Bench()

    def told(threshold: float, *, epoch: int, author: str, instances: int = 1) -> list[dict[str, Any]]:
        tiers = [CascadeTier(model="a", threshold=threshold, instances=instances), CascadeTier(model="b")]
        plan = CascadePlan(cascade="c", epoch=epoch, tiers=tiers, coordinator=author)
        return bench.heard(KeyChanged(bucket="cascade", key="c", value=plan, revision=epoch))

    assert not told(50.0, epoch=1, author="operator"), "it was there before"
    bench.heard(BucketReady(bucket="cascade"))
    assert not told(60.0, epoch=2, author="coordinator-0")
    (line,) = told(70.0, epoch=3, author="operator")
    assert (line["who"], line["thresholds"]) == ("operator", [70.0, 0.0])
    assert not told(70.0, epoch=4, author="operator", instances=2)


def test_no_field_of_an_order_hides_what_every_line_has():
    for kind in ACCEPTS:
        assert not {"time", "who", "what", "to"} & set(kind.__struct_fields__), kind
