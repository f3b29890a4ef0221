"""The comparison behind `millrace apply`: processes with a specification, and two specifications."""

from typing import Any

import pytest
from millrace.cli.apply import on_this_machine, unsafe
from millrace.cluster.reading import parse_cluster
from millrace.contracts.local import TimerFired
from millrace.contracts.provisioner import ClusterCompared, UpdateCluster

from services.supervisor.config import LaunchOptions
from services.supervisor.effects import ChildExited, SignalChild, SpecificationRead, StartChild
from services.supervisor.layout import Layout
from tests.unit.test_supervisor_provisioning import Bench

CLUSTER = """
[[models]]
name = "m"
path = "m"
[[models.groups]]
count = 2
engine = "modelled"
processes = 2
"""


def layout(text: str = CLUSTER, before: Layout | None = None) -> Layout:
    options = LaunchOptions(spec=parse_cluster(text), cores=[0])
    return Layout(options) if before is None else Layout.following(options, before, ["ingress-0"])


class Applied(Bench):
    """A supervisor whose children run."""

    def __init__(self) -> None:
        self.layout = layout()
        config = self.layout.plan()
        super().__init__([*config.nats, *config.children], [], model="")

    def take(self, text: str) -> dict[str, str]:
        self.layout = layout(text, self.layout)
        read = SpecificationRead(take=True, reply_to="inbox", machine=self.layout.plan())
        return changes(self.send(read))


def changes(effects: list[Any]) -> dict[str, str]:
    (answer,) = (body for effect in effects if isinstance(body := getattr(effect, "body", None), ClusterCompared))
    return {row.name: str(row.change) for row in answer.processes if row.change != "same"}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("", "", {}),
        ("count = 2", "count = 2\nsettings = { max_num_seqs = 9 }", {"worker-0": "changed", "worker-1": "changed"}),
        ("count = 2", "names = ['worker-0']", {"worker-1": "removed", "migrator-1": "removed"}),
        (
            "[[models]]",
            "[policies]\ndispatch.name = 'random'\n[[models]]",
            {"ingress-0": "removed", "ingress-1": "added"},
        ),
    ],
)
def test_processes_that_differ_from_the_specification_are_told_and_no_others(old, new, expected):
    text = CLUSTER.replace(old, new) if "names" not in new else CLUSTER.replace(old, new).replace("processes = 2\n", "")
    assert Applied().take(text) == expected


def test_a_changed_service_ends_and_starts_by_its_new_file():
    bench = Applied()
    settings = "[settings.coordinator]\nroles = { worker-0 = 'prefill' }\n"
    assert bench.take(CLUSTER + settings) == {"coordinator-0": "changed"}
    (signal, _, _) = bench.send(UpdateCluster(processes=["coordinator-0", "worker-0", "nobody"]))
    assert isinstance(signal, SignalChild)
    assert signal.name == "coordinator-0"
    bench.send(ChildExited(name="coordinator-0", pid=signal.pid, status=0))
    (start,) = bench.send(TimerFired(name="restart/coordinator-0"))
    assert isinstance(start, StartChild)
    assert changes(bench.send(UpdateCluster())) == {}


def test_a_new_layout_keeps_passwords_and_ports_of_what_stays():
    first = layout()
    first.plan()
    second = layout(CLUSTER.replace("count = 2", "count = 3").replace("processes = 2", "processes = 3"), first)
    assert second.passwords == first.passwords
    before = {child.name: child for child in first.plan().children}
    after = {child.name: child for child in second.plan().children}
    assert [name for name, child in before.items() if after[name] != child] == []


def test_what_has_nowhere_to_go_is_unsafe():
    def why(text: str) -> str:
        bench = Applied()
        bench.layout = layout(text, bench.layout)
        read = SpecificationRead(take=False, reply_to="inbox", machine=bench.layout.plan())
        (reply,) = bench.send(read)
        return unsafe(reply.body.processes)  # type: ignore[attr-defined]

    assert not why(CLUSTER)
    assert "no instance of m would be left" in why(CLUSTER.replace('name = "m"', 'name = "other"'))
    one = CLUSTER.replace("count = 2", "count = 1").replace("processes = 2", "processes = 1")
    assert not why(one)
    assert "only instance of m" in why(one + "settings = { max_num_seqs = 9 }\n")


def test_addresses_that_the_file_does_not_name_stay():
    now = parse_cluster(CLUSTER + "[api]\nport = 9000\nkeys = 'k'\n[nats]\nport = 4333\n[page]\nport = 0\n")
    assert on_this_machine(parse_cluster(CLUSTER), now) == now
    assert on_this_machine(parse_cluster(CLUSTER + "[api]\nport = 9001\n"), now).api.port == 9001
