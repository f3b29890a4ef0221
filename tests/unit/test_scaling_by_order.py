"""Scaling by an operator's order: which instances begin and end, how long that may take, and what is refused."""

from typing import Any

import msgspec
import pytest
from millrace.actor.effects import Effect, Reply, Request
from millrace.contracts.coordinator import OrderAccepted, OrderRefusal, OrderRefused, SetInstances
from millrace.contracts.kv import KvEndpoint
from millrace.contracts.local import KeyChanged, Replied, RequestFailed, RequestFailure
from millrace.contracts.message import Message
from millrace.contracts.plan import InstanceRole
from millrace.contracts.provisioner import InstanceOrdered, StartInstance
from millrace.policies.provisioning.by_order import (
    LEAST_S,
    ORDER_MAX,
    ScalableInstance,
    ScaleAnswer,
    ScaleQuestion,
    emptying_s,
    scale,
)

from tests.unit.coordinator_bench import MODEL, Bench, record, summary

BOTH, PREFILL, DECODE = InstanceRole


def one(name: str, role: InstanceRole = BOTH, *, tokens: int = 0, **fields: Any) -> ScalableInstance:
    return ScalableInstance(name=name, stage="s0", role=role, context_tokens=tokens, token_bytes=1000.0, **fields)


def asked(count: int, *instances: ScalableInstance, shape: str = "", role: InstanceRole | None = None) -> ScaleAnswer:
    return scale(ScaleQuestion(count=count, shape=shape, role=role, instances=instances))


# the decision


def test_those_with_the_least_to_move_end_first_then_the_youngest() -> None:
    a, b, c = one("a", tokens=500, since_ns=3), one("b", tokens=20, since_ns=1), one("c", tokens=20, since_ns=2)
    assert asked(2, a, b, c).stop == ("c",)
    assert asked(1, a, b, c).stop == ("c", "b")
    assert asked(3, a, b, c) == ScaleAnswer(detail="3 serve")
    assert asked(5, a, b, c).start == 2


def test_shape_and_role_name_those_that_are_meant() -> None:
    instances = (one("a", PREFILL, shape="cpu"), one("b", DECODE, shape="cpu"), one("c", DECODE, shape="h100x2"))
    assert asked(2, *instances, shape="cpu").start == 0
    assert asked(2, *instances, shape="h100x2").start == 1
    assert asked(1, *instances, role=DECODE).stop == ("b",)
    assert asked(0, *instances, shape="h100x2").stop == ("c",)
    assert asked(2, *instances, shape="h100").start == 2, "whether there are such is for provisioners to say"


@pytest.mark.parametrize(
    ("count", "instances"),
    [
        (0, (one("a"),)),
        (1, (one("p", PREFILL), one("d", DECODE))),
        (0, (one("a"), one("b"))),
        (1, (one("a", stoppable=False), one("b", stoppable=False))),
    ],
)
def test_a_stage_keeps_one_that_prefills_and_one_that_decodes(
    count: int, instances: tuple[ScalableInstance, ...]
) -> None:
    answer = asked(count, *instances)
    assert (answer.refusal, answer.start, answer.stop) == (OrderRefusal.NOT_CAPABLE, 0, ())
    assert answer.detail


def test_the_limit_follows_from_what_is_held() -> None:
    assert emptying_s(one("a"), bytes_per_s=1e9) == LEAST_S
    assert emptying_s(one("a", tokens=10**6), bytes_per_s=1e9) == LEAST_S + 2 * 1.0
    many = emptying_s(one("a", tokens=10**6, sequences=12), bytes_per_s=1e9)
    assert many == LEAST_S + 2 * (1.0 + 12 * 0.25 / 3)
    stuck = msgspec.structs.replace(one("a"), token_bytes=0.0)
    assert emptying_s(stuck, bytes_per_s=1e9) is None


# in the coordinator


KV = KvEndpoint(machine="m", fingerprint="f", copiers=[], block_bytes=32_000, block_tokens=32, blocks=9)


class Scaled(Bench):
    """A coordinator of some instances, an operator, and provisioners that answer as told."""

    def __init__(self, *names: str) -> None:
        self.asked: list[Request] = []
        super().__init__(*(names or ("w0", "w1")))

    def register(self, name: str, incarnation: int = 5) -> None:
        value = msgspec.structs.replace(record(name, incarnation), shape="cpu", kv=KV)
        self.send(KeyChanged(bucket="instance", key=name, value=value, revision=1))

    def answers(self, effects: list[Effect]) -> list[OrderAccepted | OrderRefused]:
        self.take(effects)
        self.asked += [effect for effect in effects if isinstance(effect, Request)]
        return [e.body for e in effects if isinstance(e, Reply) and isinstance(e.body, OrderAccepted | OrderRefused)]

    def order(self, count: int, **fields: Any) -> list[OrderAccepted | OrderRefused]:
        for name in self.registered:
            self.send(msgspec.structs.replace(summary(name), running=3, running_tokens=900))
        body = SetInstances(model=MODEL, count=count, **fields)
        return self.answers(self.actor.handle(Message(body, reply_to="_INBOX.operator.1"), self.now_ns))

    def replied(self, request: Request, body: Any) -> list[OrderAccepted | OrderRefused]:
        message = Message(Replied(correlation=request.correlation, body=body))
        return self.answers(self.actor.handle(message, self.now_ns))


@pytest.fixture
def bench() -> Scaled:
    return Scaled()


def test_more_instances_of_a_shape_and_a_role_are_started_and_come_with_it(bench: Scaled) -> None:
    assert bench.order(2, shape="cpu", role=DECODE) == []
    assert [(type(request.body), request.body.shape) for request in bench.asked] == [(StartInstance, "cpu")] * 2
    assert bench.replied(bench.asked[0], InstanceOrdered(instance="w2")) == []
    answers = bench.replied(bench.asked[1], InstanceOrdered(instance="w3"))
    assert answers == [OrderAccepted(detail="w2, w3 begins", starting=["w2", "w3"])]
    bench.register("w2")
    assert bench.plan.stages[0].roles == {"w2": DECODE}
    assert bench.plan.role_orders == {"w2": DECODE, "w3": DECODE}


def test_fewer_instances_drain_within_a_limit_that_is_told() -> None:
    bench = Scaled("w0", "w1", "w2")
    bench.order(2)
    (request,) = bench.asked
    # 900 tokens of 1000 bytes at 10 GB/s are nothing; three sequences, three at a time, take a quarter of a second.
    assert request.body.drain_limit_ms == 2500
    (answer,) = bench.replied(request, InstanceOrdered(instance=request.body.instance))
    assert isinstance(answer, OrderAccepted)
    assert answer.detail == f"{request.body.instance} drains, empty within 2.5 s"
    assert (answer.stopping, answer.limit_ms) == ([request.body.instance], 2500)


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        (OrderRefusal.UNKNOWN_SHAPE, OrderRefusal.UNKNOWN_SHAPE),
        (OrderRefusal.AT_BOUND, OrderRefusal.NO_DEVICE),
        (OrderRefusal.STOPPING, OrderRefusal.NOT_KEPT),
    ],
)
def test_what_provisioners_refuse_is_told(bench: Scaled, refusal: OrderRefusal, reason: OrderRefusal) -> None:
    bench.order(1, shape="h100x2")
    (answer,) = bench.replied(bench.asked[0], OrderRefused(reason=refusal, detail="why"))
    assert answer == OrderRefused(reason=reason, detail=f"{refusal}: why")


def test_some_may_begin_where_others_cannot(bench: Scaled) -> None:
    bench.order(4)
    bench.replied(bench.asked[0], InstanceOrdered(instance="w2"))
    (answer,) = bench.replied(bench.asked[1], OrderRefused(reason=OrderRefusal.AT_BOUND, detail="3 are the bound"))
    assert isinstance(answer, OrderAccepted)
    assert answer.detail == "w2 begins; one more not (at_bound: 3 are the bound)"


def test_silence_of_a_provisioner_is_told_after_a_second_try(bench: Scaled) -> None:
    bench.order(3)
    failed = Message(RequestFailed(correlation=bench.asked[0].correlation, reason=RequestFailure.TIMEOUT))
    assert bench.answers(bench.actor.handle(failed, bench.now_ns)) == []
    (answer,) = bench.answers(bench.actor.handle(failed, bench.now_ns))
    assert answer.reason is OrderRefusal.NOT_KEPT


def test_orders_that_cannot_be_carried_out_now_are_refused() -> None:
    bench = Scaled("w0", "w1", "w2")
    for count, fields, reason in (
        (0, {}, OrderRefusal.NOT_CAPABLE),
        (-3, {}, OrderRefusal.INVALID),
        (ORDER_MAX + 4, {}, OrderRefusal.INVALID),
        (2, {"plan_epoch": bench.plan.epoch - 1}, OrderRefusal.OLD_PLAN),
    ):
        (answer,) = bench.order(count, **fields)
        assert answer.reason is reason
    assert bench.order(3) == [OrderAccepted(detail="3 serve, as asked")]
    bench.order(4)
    (answer,) = bench.order(5)
    assert answer.reason is OrderRefusal.SCALING
