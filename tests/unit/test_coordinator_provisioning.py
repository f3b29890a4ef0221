"""Provisioning in the coordinator: what it asks of provisioners, and what it does with their answers and silence."""

from typing import Any

import msgspec
import pytest
from millrace.actor.effects import Effect, Log, Publish, Request
from millrace.contracts.coordinator import OrderRefusal, OrderRefused
from millrace.contracts.local import KeyChanged, Replied, RequestFailed, RequestFailure
from millrace.contracts.message import Body, ErrorReply
from millrace.contracts.observers import CandidateForecast, ProvisioningDecided, RequestFinished
from millrace.contracts.plan import Lease
from millrace.contracts.provisioner import InstanceOrdered, StartInstance, StopInstance
from millrace.contracts.status import ServicePresence
from prometheus_client import CollectorRegistry

from services.coordinator.config import ProvisioningConfig
from services.coordinator.fleet import SAMPLES_MAX
from services.coordinator.leased_plans import LEASE_NS
from services.coordinator.provisioning import STOP_GRACE_NS
from tests.testbed.messages import decision
from tests.unit.coordinator_bench import MODEL, Bench, S, summary

RULES = {"threshold_s": 10, "cooldown_s": 5, "instances_max": 4, "low_s": 10, "low_utilisation": 0.3}


class Provisioned(Bench):
    """A leading coordinator with instances that stay well, unless told otherwise."""

    def __init__(self, *names: str, strategy: str = "preempt", hosts: list[str] | None = None, **rules: Any) -> None:
        self.incarnations: dict[str, int] = {}
        self.draining: set[str] = set()
        self.requests = 32
        self.registry = CollectorRegistry()
        config = ProvisioningConfig(strategy=strategy, parameters=RULES | rules, hosts=hosts or ["local"])
        super().__init__(registry=self.registry, name="c", provisioning=config)
        self.lease()
        for name in names:
            self.register(name)
        self.tick()

    def lease(self, holder: str = "c") -> None:
        until_ns = self.now_ns + 1000 * LEASE_NS
        self.told("lease", MODEL, Lease(model=MODEL, holder=holder, incarnation=1, until_ns=until_ns))

    def register(self, name: str, incarnation: int = 0) -> None:
        self.incarnations[name] = incarnation or self.now_ns
        super().register(name, self.incarnations[name])

    def gone(self, name: str) -> None:
        del self.incarnations[name]
        self.send(KeyChanged(bucket="instance", key=name, value=None, revision=2))

    def tick(self, seconds: float = 1.0) -> list[Effect]:
        self.now_ns += int(seconds * S)
        for name, incarnation in self.incarnations.items():
            told = summary(name, incarnation, draining=name in self.draining)
            self.send(msgspec.structs.replace(told, at_ns=self.now_ns, running=self.requests))
        return super().tick(0)

    def placed(self, e2e_s: float, *, note: str = "", kind: str = "dispatch") -> None:
        chosen = CandidateForecast("a", e2e_ns=int(e2e_s * S), note=note)
        self.send(
            decision(
                "r", model=MODEL, kind=kind, chosen="a", forecasts=[CandidateForecast("other", e2e_ns=99 * S), chosen]
            )
        )

    def slow(self) -> list[Effect]:
        """A cool-down passes and a slow forecast comes: whatever is asked for then."""
        self.tick(200)
        self.placed(11)
        return self.tick()

    def order_a_start(self, instance: str = "b") -> list[Effect]:
        return self.answer(self.slow(), InstanceOrdered(instance=instance))

    def answer(self, effects: list[Effect], body: Body) -> list[Effect]:
        return [e for request in asked(effects) for e in self.send(Replied(correlation=request.correlation, body=body))]

    def fail(self, effects: list[Effect], reason: RequestFailure) -> list[Effect]:
        failed = [RequestFailed(correlation=request.correlation, reason=reason) for request in asked(effects)]
        return [e for body in failed for e in self.send(body)]

    def order_a_stop(self) -> list[Effect]:
        self.requests = 0
        return self.tick(200) + self.tick(10)

    @property
    def state(self) -> dict[str, Any]:
        return self.actor.snapshot()["provisioning"][MODEL]

    def orders(self, action: str, outcome: str) -> int:
        labels = {"action": action, "outcome": outcome}
        return int(self.registry.get_sample_value("millrace_provisioning_orders_total", labels) or 0)


def asked(effects: list[Effect]) -> list[Request]:
    return [effect for effect in effects if isinstance(effect, Request)]


def logged(effects: list[Effect]) -> list[str]:
    return [effect.event for effect in effects if isinstance(effect, Log) and effect.event.startswith("provision")]


def decided(effects: list[Effect]) -> list[ProvisioningDecided]:
    bodies = [effect.body for effect in effects if isinstance(effect, Publish)]
    return [body for body in bodies if isinstance(body, ProvisioningDecided)]


@pytest.fixture
def bench() -> Provisioned:
    return Provisioned("a")


def test_a_slow_forecast_asks_the_provisioner_for_one_more_and_says_why(bench: Provisioned) -> None:
    effects = bench.slow()
    (request,) = asked(effects)
    assert request.subject == "mr.local.provision.local.start"
    assert request.body == StartInstance(order="c/1/1", model=MODEL)
    (why,) = decided(effects)
    assert (why.action, why.count, why.serving, why.signal_ns) == ("start", 1, 1, 11 * S)
    assert "predicted latency 11 s over 10 s" in why.reason


@pytest.mark.parametrize("fields", [{"note": "no answer"}, {"kind": "continuation"}])
def test_only_forecasts_of_new_requests_count(bench: Provisioned, fields: dict[str, str]) -> None:
    bench.tick(200)
    bench.placed(99, **fields)
    assert asked(bench.tick()) == []


@pytest.mark.parametrize(("outcome", "asks"), [("completed", 1), ("cancelled", 0), ("failed", 0)])
def test_relief_hears_completed_requests_only(outcome: str, asks: int) -> None:
    bench = Provisioned("a", strategy="relief")
    bench.tick(200)
    bench.placed(99)
    bench.send(RequestFinished(request="r", model=MODEL, outcome=outcome, ingress="i", e2e_ns=11 * S))
    assert len(asked(bench.tick())) == asks


def test_nothing_more_is_asked_while_one_starts_and_once_it_serves_all_begins_anew(bench: Provisioned) -> None:
    assert bench.order_a_start() == []
    assert bench.state["starting"] == ["b"]
    assert asked(bench.slow()) == []
    bench.tick(20)
    bench.register("b")
    assert logged(bench.tick()) == ["provisioning_order_ended"]
    assert bench.state["starting"] == []
    assert len(asked(bench.slow())) == 1
    assert bench.orders("start", "done") == 1


def test_the_bound_counts_all_that_hold_a_place() -> None:
    bench = Provisioned("a", "b", "c", starting_max=4)
    bench.draining.add("b")
    bench.order_a_start("d")
    assert asked(bench.slow()) == []


def test_a_start_that_never_registers_is_given_up_and_stretches_the_cool_down() -> None:
    bench = Provisioned("a", cooldown_s=300)
    bench.tick(300)
    bench.placed(11)
    bench.answer(bench.tick(), InstanceOrdered(instance="b"))
    effects = bench.tick(600)
    (stop,) = asked(effects)
    assert stop.body == StopInstance(instance="b", drain_limit_ms=0)
    assert bench.orders("start", "late") == 1
    bench.answer(effects, InstanceOrdered(instance="b"))
    assert logged(bench.tick()) == ["provisioning_order_ended"]  # it is not there, so it is gone
    bench.placed(11)
    assert asked(bench.tick()) != []  # 601 s have passed: the stretched cool-down is over
    bench = Provisioned("a", cooldown_s=301)
    bench.tick(301)
    bench.placed(11)
    bench.answer(bench.tick(), InstanceOrdered(instance="b"))
    bench.tick(600)
    bench.placed(11)
    assert asked(bench.tick()) == []


def test_a_refusal_goes_to_a_machine_that_joined_and_the_last_one_is_said_once() -> None:
    bench = Provisioned("a", hosts=["one"])
    for _ in range(2):
        bench.send(ServicePresence(role="supervisor", name="s", incarnation=1, at_ns=bench.now_ns, host="two"))
    refusal = OrderRefused(reason=OrderRefusal.AT_BOUND, detail="2 of 2")
    (again,) = asked(bench.answer(bench.slow(), refusal))
    assert again.subject == "mr.local.provision.two.start"
    assert logged(bench.answer([again], refusal)) == ["provisioning_failed"]
    assert bench.state["failures"] == 1
    (again,) = asked(bench.answer(bench.slow(), refusal))
    assert logged(bench.answer([again], refusal)) == []
    assert bench.orders("start", "at_bound") == 2


def test_without_a_provisioner_or_with_an_answer_that_is_none_the_cluster_stays_as_it_is(bench: Provisioned) -> None:
    assert logged(bench.fail(bench.slow(), RequestFailure.NO_RESPONDERS)) == ["provisioning_failed"]
    assert bench.orders("start", "no_responders") == 1
    assert bench.state == {"asked": 0, "starting": [], "stopping": [], "failures": 1}
    bench.answer(bench.slow(), ErrorReply(reason="unexpected"))
    assert bench.state["failures"] == 2


def test_an_order_without_an_answer_is_repeated_under_its_name_and_then_given_up() -> None:
    bench = Provisioned("a", hosts=["one", "two"])
    first = bench.slow()
    second = bench.fail(first, RequestFailure.TIMEOUT)
    assert [r.body for r in asked(second)] == [r.body for r in asked(first)]
    assert logged(bench.fail(second, RequestFailure.TIMEOUT)) == ["provisioning_failed"]
    assert bench.orders("start", "unanswered") == 1


def test_after_low_load_the_youngest_is_stopped_and_nobody_else_until_it_is_gone(bench: Provisioned) -> None:
    bench.tick()
    bench.register("b")
    effects = bench.order_a_stop()
    (request,) = asked(effects)
    assert request.subject == "mr.local.provision.local.stop"
    assert request.body == StopInstance(instance="b", drain_limit_ms=30_000)
    assert decided(effects)[0].instances == ["b"]
    bench.answer(effects, InstanceOrdered(instance="b"))
    bench.draining.add("b")
    bench.tick(200 // 10)
    assert bench.state["stopping"] == ["b"]
    bench.gone("b")
    assert logged(bench.tick()) == ["provisioning_order_ended"]
    assert asked(bench.order_a_stop()) == []  # one is the least


def test_one_that_does_not_go_is_said_and_counted() -> None:
    bench = Provisioned("a", "b")
    bench.answer(bench.order_a_stop(), InstanceOrdered(instance="b"))
    bench.requests = 32
    effects = bench.tick((30 * S + STOP_GRACE_NS) / S)
    assert logged(effects) == ["provisioning_order_ended"]
    assert bench.orders("stop", "late") == 1


@pytest.mark.parametrize("reason", [OrderRefusal.SHARED_PROCESS, OrderRefusal.UNKNOWN_INSTANCE])
def test_who_cannot_be_stopped_is_not_asked_again_until_it_was_restarted(reason: OrderRefusal) -> None:
    bench = Provisioned("a", instances_min=1)
    bench.tick()
    bench.register("b")
    bench.answer(bench.order_a_stop(), OrderRefused(reason=reason))
    (request,) = asked(bench.order_a_stop())
    assert request.body.instance == "a"  # type: ignore[attr-defined]
    bench.answer([request], OrderRefused(reason=reason))
    assert asked(bench.order_a_stop()) == []
    bench.register("b")  # a new incarnation, perhaps in another process
    (request,) = asked(bench.order_a_stop())
    assert request.body.instance == "b"  # type: ignore[attr-defined]


def test_whoever_loses_the_lease_forgets_and_whoever_gets_it_cools_down_first(bench: Provisioned) -> None:
    effects = bench.slow()
    bench.lease("somebody else")
    bench.tick()
    assert bench.actor.snapshot()["provisioning"] == {}
    assert bench.answer(effects, InstanceOrdered(instance="b")) == []
    bench.lease()
    bench.tick()
    bench.placed(11)
    assert asked(bench.tick()) == []
    bench.placed(11)
    assert len(asked(bench.tick(5))) == 1


def test_windows_are_bounded(bench: Provisioned) -> None:
    for _ in range(SAMPLES_MAX + 9):
        bench.placed(1)
    bench.actor.check_invariants()
