"""The simulated server refuses what nats-server would refuse, in every other run too."""

import pytest
from millrace.actor.effects import DeleteKey, Effect, Publish, PutKey, Reply, Subscribe
from millrace.contracts.catalog import Role
from millrace.contracts.message import Message
from millrace.contracts.plan import Lease
from millrace.contracts.subjects import Subjects
from millrace.contracts.tagger import LengthTag, TagRequest
from millrace.sim.failure import SimulationFailed
from millrace.sim.runtime_sim import SECOND, Simulation
from millrace.sim.stand_in import StandIn

from simulator.cluster import CLUSTER

SUBJECTS = Subjects(CLUSTER)
TAG = TagRequest(request="r", model="m", prompt_tokens=1, max_tokens=1)
WRITE = {"correlation": "c", "bucket": "plan", "key": "m"}
LEASE = Lease(model="m", holder="c", incarnation=1, until_ns=1)


class Starts(StandIn):
    """An actor that returns some effects at its start."""

    name = "starter"

    def __init__(self, effects: list[Effect]) -> None:
        self._effects = effects

    def start(self, now_ns: int) -> list[Effect]:
        return self._effects

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        return []


def start(role: Role, effect: Effect) -> None:
    simulation = Simulation(1, cluster=CLUSTER)
    simulation.add(lambda _incarnation: Starts([effect]), node="n", accepts=(), role=role)
    simulation.run_for(SECOND)


REFUSED = [
    (Role.TAGGER, Publish(subject=SUBJECTS.tag("m"), body=TAG)),
    (Role.TAGGER, Reply(to="_INBOX.worker.x.1", body=LengthTag(request="r", mean=1.0, source="s"))),
    (Role.TAGGER, Subscribe(subject=SUBJECTS.migrations())),
    (Role.TAGGER, Subscribe(subject="mr.other.tag.m")),
    (Role.TAGGER, Subscribe(subject=f"{SUBJECTS.prefix}.>")),
    (Role.INGRESS, Subscribe(subject="_INBOX.worker.>")),
    (Role.OBSERVER, Publish(subject=SUBJECTS.tag("m"), body=TAG)),
    (Role.WORKER, PutKey(**WRITE, value=LEASE)),
    (Role.WORKER, DeleteKey(**WRITE)),
]


@pytest.mark.parametrize(("role", "effect"), REFUSED)
def test_what_the_catalog_does_not_allow_ends_the_run(role: Role, effect: Effect) -> None:
    with pytest.raises(SimulationFailed, match=rf"starter may not .* does not let role {role}"):
        start(role, effect)
