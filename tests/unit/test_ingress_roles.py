"""Roles at ingress: whoever prefills gets new and continued sequences; whoever decodes only when nobody else can."""

from millrace.contracts.local import KeyChanged
from millrace.contracts.plan import InstanceRole, Plan, Stage

from tests.unit.ingress_core import MODEL, Bench, chunk, instance_of


def planned(**roles: InstanceRole) -> Bench:
    bench = Bench(instances=3)
    stage = Stage(name="s0", length_min=0, length_max=None, instances=["w0", "w1", "w2"], roles=roles)
    plan = Plan(model=MODEL, epoch=2, stages=[stage], coordinator="c0")
    bench.send(KeyChanged(bucket="plan", key=MODEL, value=plan, revision=2))
    return bench


def placements(bench: Bench, count: int) -> set[str]:
    for index in range(count):
        bench.run_call(f"r{index}")
    return {instance_of(request) for request in bench.submissions()}


def test_new_requests_go_where_prefills_are_done():
    bench = planned(w0=InstanceRole.PREFILL, w1=InstanceRole.DECODE)
    assert placements(bench, 8) == {"w0", "w2"}


def test_a_decode_instance_is_asked_when_no_other_is_usable():
    bench = planned(w0=InstanceRole.PREFILL, w1=InstanceRole.DECODE, w2=InstanceRole.DECODE)
    bench.die("w0", 0)
    assert placements(bench, 4) == {"w1", "w2"}
    assert bench.actor.state.cluster.usable(MODEL) == 2


def test_a_continuation_is_a_prefill():
    bench = planned(w1=InstanceRole.DECODE)
    instance = bench.run_call()
    bench.tokens(instance, chunk("abc"))
    bench.die(instance, 0)
    _, other = bench.last_submission()
    assert {instance, other} == {"w0", "w2"}
    bench.tokens(other, chunk("d", 3, epoch=1))
    bench.die(other, 0)
    assert bench.last_submission()[1] == "w1"
