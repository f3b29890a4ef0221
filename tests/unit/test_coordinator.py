"""The coordinator's actor: leases, plans, and what it does when instances come, fall silent or are declared dead."""

from millrace.actor.effects import DeleteKey, PutKey, Stop
from millrace.contracts.local import KeyChanged, StopRequested, TimerFired
from millrace.contracts.message import Message
from millrace.contracts.plan import InstanceRole, Lease, Plan, Stage
from millrace.contracts.status import PresenceState, ServicePresence
from millrace.membership.config import MembershipConfig

from services.coordinator.leased_plans import LEASE_NS
from tests.unit.coordinator_bench import MODEL, Bench, S, summary

EMPTY = Stage(name="s0", length_min=0, length_max=None, instances=[])


def foreign_lease(until_ns: int, holder: str = "coordinator-9", incarnation: int = 1) -> KeyChanged:
    lease = Lease(model=MODEL, holder=holder, incarnation=incarnation, until_ns=until_ns)
    return KeyChanged(bucket="lease", key=MODEL, value=lease, revision=7)


def test_nothing_is_planned_under_somebody_elses_lease_and_it_is_taken_when_it_ran_out() -> None:
    bench = Bench()
    bench.send(foreign_lease(bench.now_ns + LEASE_NS))
    bench.register("a")
    bench.tick()
    assert bench.plan is None
    effects = bench.actor.handle(Message(TimerFired(name="tick")), bench.now_ns + LEASE_NS)
    puts = [effect for effect in effects if isinstance(effect, PutKey)]
    assert [(put.bucket, put.expected_revision) for put in puts] == [("lease", 7)]


def test_a_restarted_coordinator_takes_its_own_lease_over_at_once() -> None:
    bench = Bench(incarnation=2)
    lease = foreign_lease(bench.now_ns + LEASE_NS, holder="coordinator-0", incarnation=1)
    effects = bench.send(lease, store=False)
    assert [effect.expected_revision for effect in effects if isinstance(effect, PutKey)] == [7]


def test_instances_bring_a_lease_and_a_plan_and_a_repeated_registration_changes_nothing() -> None:
    bench = Bench()
    bench.register("a")
    assert bench.keys["lease", MODEL][0].holder == "coordinator-0"  # type: ignore[attr-defined]
    assert bench.plan.epoch == 1
    assert [(s.length_min, s.length_max, s.instances) for s in bench.plan.stages] == [(0, None, ["a"])]
    bench.register("b")
    assert (bench.plan.epoch, bench.planned) == (2, ["a", "b"])
    bench.register("b")
    bench.tick()
    assert bench.plan.epoch == 2


def test_who_is_silent_leaves_the_plan_until_its_next_word_unless_the_coordinator_stood_still() -> None:
    bench = Bench("a", "b")
    bench.now_ns += MembershipConfig().plan_silence_ns + 10 * S
    bench.send(summary("b"))
    assert bench.planned == ["a", "b"]
    for _ in range(MembershipConfig().plan_silence_ns // S + 1):
        bench.tick()
        bench.send(summary("b"))
    assert bench.planned == ["b"]
    bench.send(summary("a"))
    assert bench.planned == ["a", "b"]


def test_who_drains_or_is_declared_dead_leaves_at_once_and_of_the_dead_only_a_new_incarnation_returns() -> None:
    bench = Bench("a", "b", "c")
    bench.send(summary("c", draining=True))
    assert bench.planned == ["a", "b"]
    dead = ServicePresence(role="worker", name="a", incarnation=0, at_ns=bench.now_ns, state=PresenceState.DEAD)
    bench.send(dead)
    assert bench.planned == ["b"]
    bench.send(summary("a"))
    assert bench.planned == ["b"]
    bench.register("a", incarnation=bench.now_ns + 1)
    assert bench.planned == ["a", "b"]


def test_a_lease_is_renewed_before_it_ends() -> None:
    bench = Bench()
    bench.register("a")
    for _ in range(600):
        bench.send(summary("a"))
        bench.tick()
        assert bench.keys["lease", MODEL][0].until_ns > bench.now_ns
    assert bench.plan.epoch == 1


def test_a_lost_write_is_not_repeated_until_the_next_tick() -> None:
    bench = Bench()
    bench.register("a")
    bench.tick()
    bench.keys["plan", MODEL] = (Plan(model=MODEL, epoch=8, stages=[EMPTY], coordinator="x"), 99)
    bench.register("b")  # its write meets revision 99 and loses
    assert bench.keys["plan", MODEL][1] == 99
    bench.send(KeyChanged(bucket="plan", key=MODEL, value=bench.keys["plan", MODEL][0], revision=99))
    bench.tick()
    assert (bench.plan.epoch, bench.planned) == (9, ["a", "b"])


def test_stopping_gives_the_lease_back() -> None:
    bench = Bench()
    bench.register("a")
    bench.tick()
    effects = bench.send(StopRequested())
    assert any(isinstance(effect, DeleteKey) and effect.bucket == "lease" for effect in effects)
    assert isinstance(effects[-1], Stop)


PREFILL, DECODE, BOTH = InstanceRole.PREFILL, InstanceRole.DECODE, InstanceRole.BOTH


def test_the_plan_names_the_roles_of_those_who_are_there() -> None:
    roles = {"d-*": DECODE, "d-1*": PREFILL, "p": PREFILL, "d-7": BOTH, "absent": DECODE}
    bench = Bench(roles=roles)  # a name comes before patterns, and the first pattern before others
    for name in ("p", "d-1", "d-7", "other"):
        bench.register(name)
    assert bench.plan.stages[0].roles == {"p": PREFILL, "d-1": DECODE}
    assert bench.planned == ["d-1", "d-7", "other", "p"]
