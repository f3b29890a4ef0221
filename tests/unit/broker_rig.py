"""Brokers in virtual time, with instances whose sequences grow and migrators that move them after a while."""

import functools
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from millrace.actor.config import BusConfig
from millrace.actor.effects import (
    CancelTimer,
    Effect,
    Publish,
    Reply,
    Request,
    StartTimer,
    Stop,
    Subscribe,
    Unsubscribe,
)
from millrace.contracts.kv import KvEndpoint, KvRefusal
from millrace.contracts.local import (
    BusDisconnected,
    BusReconnected,
    KeyChanged,
    Replied,
    RequestFailed,
    RequestFailure,
    StopRequested,
    TimerFired,
)
from millrace.contracts.message import Body, Message
from millrace.contracts.migration import (
    MigrateSequence,
    MigrationCost,
    MigrationFinished,
    MigrationOutcome,
    MoveSequence,
)
from millrace.contracts.plan import InstanceRole, Plan, Stage
from millrace.contracts.status import InstanceRecord, InstanceSummary, SequenceState, SequenceStatus, StatusSnapshot
from millrace.enginemodel.step_time_models import LinearStepTime
from millrace.hosting.step_times import StepTimeDeps

from papers import PAPERS
from services.broker.actor import BrokerActor
from services.broker.build import build
from services.broker.config import BrokerConfig, BrokerLimits, FenceConfig, MemoryConfig, TradingConfig
from services.broker.metrics import BrokerMetrics
from tests.testbed.messages import plain, plain_record, plain_snapshot, plain_summary

MS = 1_000_000
SECOND = 1_000 * MS
START_NS = 1_000_000 * MS
HOP_NS = 200_000
MODEL = "m"
BLOCK = 16

#: 10 ms per step, and 1 us per token of context: 10,000 tokens double the step.
STEP_TIME = LinearStepTime(fixed=10e6, per_prefill_token=1_000.0, per_context_token=1_000.0)

#: Moves by present tokens, at once: what a test of brokers sees without forecasts.
EAGER = f"{PAPERS}/cascadeinfer/trading.py"

#: What happens to a message: delays at which it arrives; none loses it, two double it.
Tamper = Callable[[str, Body], list[int]]


@dataclass
class FakeSequence:
    """A sequence that gets a token every ``token_ns`` until ``final`` are there."""

    prompt: int
    output: int = 10
    expected: int | None = None
    p90: int | None = None
    at: int | None = None
    token_ns: int = 10 * MS
    final: int = 100_000
    since_ns: int = START_NS
    state: SequenceState = SequenceState.RUNNING
    immovable: str = ""

    def output_at(self, now_ns: int) -> int:
        if self.state is not SequenceState.RUNNING:
            return self.output
        return min(self.final, self.output + (now_ns - self.since_ns) // self.token_ns)

    def blocks_at(self, now_ns: int) -> int:
        if self.state is not SequenceState.RUNNING:
            return 0
        return -(-(self.prompt + self.output_at(now_ns)) // BLOCK)


@dataclass
class FakeInstance:
    """An engine as its snapshots show it."""

    name: str
    sequences: dict[str, FakeSequence] = field(default_factory=dict)
    blocks: int = 2_000
    incarnation: int = 5
    draining: bool = False
    silent: bool = False
    kv_moves: bool = True
    steps: int = 0

    def statuses(self, now_ns: int) -> list[SequenceStatus]:
        return [
            SequenceStatus(
                sequence=name,
                state=each.state,
                prompt_tokens=each.prompt,
                computed_tokens=each.prompt + each.output_at(now_ns) - 1,
                output_tokens=each.output_at(now_ns),
                max_tokens=100_000,
                blocks=each.blocks_at(now_ns),
                arrival_ns=START_NS,
                expected_output_tokens=each.expected,
                immovable=each.immovable,
                expected_p90=each.p90,
                expected_at=each.at,
            )
            for name, each in self.sequences.items()
        ]

    def snapshot(self, now_ns: int) -> StatusSnapshot:
        self.steps += 1
        running = [each for each in self.statuses(now_ns) if each.state is SequenceState.RUNNING]
        used = sum(status.blocks for status in running)
        return plain_snapshot(
            self.name,
            incarnation=self.incarnation,
            model=MODEL,
            step=self.steps,
            at_ns=now_ns,
            running=running,
            waiting=[each for each in self.statuses(now_ns) if each.state is not SequenceState.RUNNING],
            blocks_free=max(0, self.blocks - used),
            blocks_total=self.blocks,
            step_duration_ns=10 * MS,
        )

    def summary(self, now_ns: int) -> InstanceSummary:
        return plain_summary(
            self.name,
            incarnation=self.incarnation,
            model=MODEL,
            at_ns=now_ns,
            running=len(self.sequences),
            blocks_free=0,
            blocks_total=self.blocks,
            block_size=BLOCK,
            draining=self.draining,
        )

    def record(self) -> InstanceRecord:
        return plain_record(
            self.name,
            incarnation=self.incarnation,
            model=MODEL,
            max_model_len=16_384,
            max_sequences=64,
            token_budget=2_048,
            block_size=BLOCK,
            blocks_total=self.blocks,
            step_time="linear",
            kv=plain(KvEndpoint, block_tokens=BLOCK, blocks=self.blocks) if self.kv_moves else None,
        )


def plan(*stages: tuple[int, list[str]], epoch: int = 1, roles: dict[str, InstanceRole] | None = None) -> Plan:
    """Stages by where they begin."""
    ends = [begin for begin, _ in stages[1:]] + [None]
    named = [
        Stage(
            name=f"s{index}",
            length_min=begin,
            length_max=end,
            instances=names,
            roles={name: role for name, role in (roles or {}).items() if name in names},
            covered_by="" if names else next(f"s{i}" for i, (_, held) in enumerate(stages) if held),
        )
        for index, ((begin, names), end) in enumerate(zip(stages, ends, strict=True))
    ]
    return Plan(model=MODEL, epoch=epoch, stages=named, coordinator="c")


class BrokerWorld:
    """One broker for each instance, a bus between them, and migrators that obey.

    Attributes:
        said: Everything on the bus: (time, subject, sender, body).
        moves: Migrations that were begun: (time, sequence, source, target).
        transfer_ns: What a migration takes.
        refuse: What a migrator answers instead of moving, by target; None moves.
        deaf_migrators: Instances whose migrators never answer.
    """

    def __init__(
        self, *instances: FakeInstance, policy: str = EAGER, seed: int = 1, settle: bool = True, **config: Any
    ) -> None:
        self.now_ns = START_NS
        self.seed = seed
        self.instances = {each.name: each for each in instances}
        self.said: list[tuple[int, str, str, Body]] = []
        self.moves: list[tuple[int, str, str, str]] = []
        self.transfer_ns = 50 * MS
        self.refuse: dict[str, KvRefusal] = {}
        self.deaf_migrators: set[str] = set()
        self.tamper: Tamper = lambda subject, body: [HOP_NS]
        self.metrics: dict[str, BrokerMetrics] = {}
        self.brokers: dict[str, BrokerActor] = {}
        self.dead: set[str] = set()
        self._config = {"policy": policy, **config}
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self._timers: dict[tuple[str, str], int] = {}
        self._subscribed: dict[str, set[str]] = {}
        self._plan: Plan | None = None
        self._reachable = True
        self._replies: dict[str, Callable[[Body], None]] = {}
        self.rng = Random(seed)
        for name in self.instances:
            self.start_broker(name)
        for name in self.instances:
            self._tell_status(name)
        if settle:
            self.run(1_000)

    # brokers

    def start_broker(self, instance: str) -> BrokerActor:
        """A new process for one instance."""
        name = f"broker-{instance}"
        config = dict(self._config)
        trading = TradingConfig(
            policy=config.pop("policy"),
            parameters=config.pop("parameters", {}),
            **({"reasons": tuple(config.pop("reasons"))} if "reasons" in config else {}),
        )
        fences = FenceConfig(**config.pop("fences", {}))
        memory = MemoryConfig(**config.pop("memory", {}))
        broker_config = BrokerConfig(
            name=name,
            instances=[instance],
            trading=trading,
            fences=fences,
            memory=memory,
            limits=BrokerLimits(**config),
            bus=BusConfig(cluster="test"),
        )
        deps = StepTimeDeps(
            incarnation=self.now_ns, rng=Random(f"{self.seed}/{name}/{self.now_ns}"), step_times={"linear": STEP_TIME}
        )
        actor = self.brokers[instance] = build(broker_config, deps)
        self.metrics[instance] = actor.metrics
        self.dead.discard(instance)
        self._subscribed[name] = set()
        self._timers = {key: at for key, at in self._timers.items() if key[0] != name}
        self._carry_out(instance, actor.start(self.now_ns))
        for each in self.instances.values():
            self._give(instance, KeyChanged(bucket="instance", key=each.name, value=each.record(), revision=1))
        if self._plan is not None:
            self._give(instance, KeyChanged(bucket="plan", key=MODEL, value=self._plan, revision=1))
        return actor

    def kill(self, instance: str) -> None:
        """Its broker's process ends without a word."""
        self.dead.add(instance)

    def stop(self, instance: str) -> None:
        """Its broker is asked to end."""
        self._give(instance, StopRequested())
        self.dead.add(instance)

    def set_plan(self, value: Plan) -> None:
        """Every broker hears of it."""
        self._plan = value
        for instance in self.brokers:
            self._give(instance, KeyChanged(bucket="plan", key=MODEL, value=value, revision=value.epoch))

    def unregister(self, name: str) -> None:
        """The instance is gone for good."""
        self.instances[name].silent = True
        for instance in self.brokers:
            self._give(instance, KeyChanged(bucket="instance", key=name, value=None, revision=2))

    def partition(self, *, away: bool) -> None:
        """The bus is out of reach for everybody, or comes back."""
        self._reachable = not away
        for instance in self.brokers:
            self._give(instance, BusDisconnected() if away else BusReconnected())

    # time and messages

    def at(self, delay_ns: int, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now_ns + delay_ns, self._count, action))

    def run(self, ms: int) -> None:
        """So long, checking invariants after each event."""
        until_ns = self.now_ns + ms * MS
        while self._heap and self._heap[0][0] <= until_ns:
            self.now_ns, _, action = heapq.heappop(self._heap)
            action()
        self.now_ns = until_ns

    def tell(self, subject: str, body: Body, sender: str, reply: Callable[[Body], None] | None = None) -> None:
        """Publishes as anybody."""
        self.said.append((self.now_ns, subject, sender, body))
        if not self._reachable:
            return
        for delay_ns in self.tamper(subject, body):
            self.at(delay_ns, lambda: self._deliver(subject, body, sender, reply))

    def _deliver(self, subject: str, body: Body, sender: str, reply: Callable[[Body], None] | None) -> None:
        for instance in list(self.brokers):
            name = f"broker-{instance}"
            if instance in self.dead or not any(_matches(each, subject) for each in self._subscribed[name]):
                continue
            to = ""
            if reply is not None:
                self._count += 1
                to = f"_INBOX.{self._count}"
                self._replies[to] = reply
            self._give(instance, body, subject=subject, sender=sender, reply_to=to)

    def _give(self, instance: str, body: Any, **envelope: str) -> None:
        if instance in self.dead:
            return
        actor = self.brokers[instance]
        effects = actor.handle(Message(body=body, **envelope), self.now_ns)
        actor.check_invariants()
        self._carry_out(instance, effects)

    def _carry_out(self, instance: str, effects: list[Effect]) -> None:
        name = f"broker-{instance}"
        for effect in effects:
            match effect:
                case Subscribe(subject=subject):
                    self._subscribed[name].add(subject)
                case Unsubscribe(subject=subject):
                    self._subscribed[name].discard(subject)
                case StartTimer(name=timer, at_ns=at_ns):
                    self._timers[name, timer] = at_ns
                    self.at(max(0, at_ns - self.now_ns), lambda t=timer, due=at_ns: self._fire(instance, t, due))
                case CancelTimer(name=timer):
                    self._timers.pop((name, timer), None)
                case Publish(subject=subject, body=body):
                    self.tell(subject, body, name)
                case Request():
                    self._request(instance, effect)
                case Reply(to=to, body=body):
                    if to in self._replies:
                        reply = self._replies[to]
                        for delay_ns in self.tamper("reply", body):
                            self.at(delay_ns, lambda b=body, r=reply: r(b))
                case Stop():
                    self.dead.add(instance)

    def _fire(self, instance: str, timer: str, due_ns: int) -> None:
        if self._timers.get((f"broker-{instance}", timer)) == due_ns:
            del self._timers[f"broker-{instance}", timer]
            self._give(instance, TimerFired(name=timer))

    def _request(self, instance: str, effect: Request) -> None:
        ends: list[Body] = []

        def end(body: Body) -> None:
            ends.append(body)
            if len(ends) == 1:
                self._give(instance, body)

        def answer(body: Body) -> None:
            end(Replied(correlation=effect.correlation, body=body))

        failed = RequestFailed(correlation=effect.correlation, reason=RequestFailure.TIMEOUT)
        self.at(effect.timeout_ns, lambda: end(failed))
        if isinstance(effect.body, MoveSequence):
            self._migrate(instance, effect.body, answer)
        else:
            self.tell(effect.subject, effect.body, f"broker-{instance}", answer)

    # instances and their migrators

    def _tell_status(self, name: str) -> None:
        instance = self.instances[name]
        if not instance.silent:
            for sequence, each in list(instance.sequences.items()):
                if each.output_at(self.now_ns) >= each.final:
                    del instance.sequences[sequence]
            self.tell(f"mr.test.status.{MODEL}.{name}", instance.snapshot(self.now_ns), name)
            self.tell(f"mr.test.summary.{MODEL}.{name}", instance.summary(self.now_ns), name)
        self.at(100 * MS, lambda: self._tell_status(name))

    def _migrate(self, source: str, body: MoveSequence, answer: Callable[[Body], None]) -> None:
        self.moves.append((self.now_ns, body.sequence, source, body.target))
        told = (lambda _: None) if source in self.deaf_migrators else answer
        self.at(self.transfer_ns, lambda: self._migrated(source, body, told))

    def _migrated(self, source: str, body: MoveSequence, answer: Callable[[Body], None]) -> None:
        sequence = self.instances[source].sequences.get(body.sequence)
        refusal = self.refuse.get(body.target)
        if sequence is None:
            refusal = KvRefusal.UNKNOWN_SEQUENCE
        elif self.instances[body.target].silent:
            refusal = KvRefusal.UNANSWERED
        if refusal is None and sequence is not None:
            del self.instances[source].sequences[body.sequence]
            self.instances[body.target].sequences[body.sequence] = sequence
        outcome = MigrationOutcome.MOVED if refusal is None else MigrationOutcome.REFUSED
        cost = MigrationCost(frozen_ns=5 * MS, duration_ns=self.transfer_ns)
        asked = {"sequence": body.sequence, "target": body.target, "reason": body.reason, "award": body.award}
        finished = plain(MigrationFinished, source=source, outcome=outcome, refusal=refusal, cost=cost, **asked)
        self.at(HOP_NS, lambda: answer(finished))
        self.tell(f"mr.test.migration.{MODEL}.{source}.{body.target}", finished, f"migrator-{source}")

    # what tests look at

    def bodies(self, kind: type[Any], since_ns: int = 0) -> list[Any]:
        return [body for at_ns, _, _, body in self.said if isinstance(body, kind) and at_ns >= since_ns]

    def where(self, sequence: str) -> list[str]:
        return [name for name, each in self.instances.items() if sequence in each.sequences]

    def ask_for(self, instance: str, sequence: str, **fields: Any) -> list[Any]:
        """An operator asks for a move; returns where its answers will stand."""
        return self.order(instance, "start", MigrateSequence(sequence=sequence, **fields))

    def order(self, instance: str, verb: str, body: Body) -> list[Any]:
        answers: list[Any] = []
        self.tell(f"mr.test.migrate.{instance}.{verb}", body, "operator", answers.append)
        return answers

    def open(self, instance: str, direction: str) -> dict[str, list[str]]:
        return self.brokers[instance].snapshot()["instances"][instance][direction]

    def refused(self, instance: str) -> dict[str, int]:
        return self.metrics[instance].refused.plain()

    def quiet(self) -> bool:
        """Whether nothing is asked for or moved, and no bid holds."""
        alive = [name for name in self.brokers if name not in self.dead]
        return not any(self.open(name, way) for name in alive for way in ("out", "in"))


@functools.lru_cache(maxsize=1 << 16)  # each message is matched with all that each broker subscribed to
def _matches(pattern: str, subject: str) -> bool:
    wanted, tokens = pattern.split("."), subject.split(".")
    return len(wanted) == len(tokens) and all(w in ("*", t) for w, t in zip(wanted, tokens, strict=True))


def filled(name: str, count: int, prompt: int, **fields: Any) -> FakeInstance:
    """An instance with so many sequences of one length."""
    sequences = {f"{name}r{index}.0": FakeSequence(prompt=prompt, **fields) for index in range(count)}
    return FakeInstance(name=name, sequences=sequences)


def arriving(delays_ns: list[int], *kinds: type[Body]) -> Tamper:
    """Every message of these types comes after each of these delays."""
    return lambda subject, body: delays_ns if isinstance(body, kinds) else [HOP_NS]
