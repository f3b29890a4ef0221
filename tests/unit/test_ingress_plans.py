"""Plans as ingress keeps them when the store that held them is lost."""

from millrace.contracts.plan import Plan, Stage

from services.ingress.cluster.cluster_view import IngressClusterView


def plan(epoch: int, *instances: str) -> Plan:
    stage = Stage(name="s0", length_min=0, length_max=None, instances=list(instances))
    return Plan(model="m", epoch=epoch, stages=[stage], coordinator="c")


def planned(cluster: IngressClusterView) -> list[str]:
    return [name for stage in cluster.plans["m"].stages for name in stage.instances]


def test_an_older_plan_is_ignored():
    cluster = IngressClusterView()
    cluster.take_plan("m", plan(5, "a"))
    cluster.take_plan("m", plan(4, "b"))
    assert planned(cluster) == ["a"]


def test_a_plan_that_is_gone_holds_until_another_is_written_whatever_its_epoch():
    cluster = IngressClusterView()
    cluster.take_plan("m", plan(5, "a"))
    cluster.take_plan("m", None)
    assert planned(cluster) == ["a"]
    cluster.take_plan("m", plan(1, "b"))
    assert planned(cluster) == ["b"]
    cluster.take_plan("m", plan(0, "c"))
    assert planned(cluster) == ["b"]


def test_after_a_reconnect_the_stores_plan_counts_even_if_its_epochs_began_anew():
    cluster = IngressClusterView()
    cluster.take_plan("m", plan(12, "a"))
    cluster.reset_liveness(now_ns=1)
    cluster.take_plan("m", plan(1, "b"))
    assert planned(cluster) == ["b"]
