"""What ingress knows of instances and plans, and the views that dispatch policies see.

Each instance has one frozen InstanceView that is replaced when its summary comes or when this ingress places or ends
something there. Each stage keeps a list of its usable views, patched in place and handed out as a tuple: a decision
over 64 instances copies 64 references and nothing else.

**In flight.** A summary is up to 250 ms old, and one step behind the engine's queue. What this ingress placed is
therefore counted as ``in_flight_*`` from the placement until the second summary after its acceptance (the first may
have been written before the engine saw it), or until it ends. Counting it twice for one period spreads load; not
counting it would send a whole burst to the instance that was idle a moment ago.
"""

from __future__ import annotations

from collections.abc import Iterator

from millrace.contracts.observers import CandidateScore
from millrace.contracts.plan import Plan, Stage
from millrace.contracts.status import InstanceRecord, InstanceSummary
from millrace.policies.dispatch.view import InstanceView

#: Instances known at once. A cluster has hundreds; beyond it strangers are forgotten, then more are ignored.
INSTANCES_MAX = 4_096
#: Fresh summaries that must come after an acceptance until it no longer counts as in flight.
IN_FLIGHT_SUMMARIES = 2
_NOT_ACCEPTED = -1


class Instance:
    """One instance as ingress sees it. ``incarnation`` 0 means never heard of."""

    __slots__ = (
        "_in_flight",
        "_in_flight_tokens",
        "_summaries",
        "buried",
        "dead",
        "heard_ns",
        "incarnation",
        "name",
        "placements",
        "record",
        "stages",
        "summary",
        "usable",
        "used",
        "view",
        "withdrawn",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.incarnation = 0
        self.heard_ns = 0
        self.buried = False  # its process was seen to end
        self.dead = True  # nothing heard yet, or said to be dead, or silent: no new work
        self.withdrawn = False  # it handed sequences back; until its next summary says that it is not draining
        self.record: InstanceRecord | None = None
        self.summary: InstanceSummary | None = None
        self.usable = False
        self.used = False  # something was placed here once
        self.placements = 0  # sequences placed here so far
        self.view = InstanceView(name=name)
        self.stages: list[StageList] = []
        self._summaries = 0
        self._in_flight: dict[str, list[int]] = {}  # sequence -> [tokens, summary number at which it leaves]
        self._in_flight_tokens = 0

    def why_not(self) -> str:
        """Why it takes no new work; empty where it does."""
        if self.incarnation == 0:
            return "never heard of"
        if self.dead:
            return "silent or dead"
        if self.withdrawn or (self.summary is not None and self.summary.draining):
            return "draining"
        return ""

    def place(self, sequence: str, tokens: int) -> None:
        """Counts a sequence as in flight."""
        self.remove(sequence, refresh=False)
        self.used = True
        self.placements += 1
        self._in_flight[sequence] = [tokens, _NOT_ACCEPTED]
        self._in_flight_tokens += tokens
        self.refresh()

    def accept(self, sequence: str) -> None:
        """The instance has it: later summaries will count it."""
        entry = self._in_flight.get(sequence)
        if entry is not None:
            entry[1] = self._summaries + IN_FLIGHT_SUMMARIES

    def remove(self, sequence: str, *, refresh: bool = True) -> None:
        """It ended or went elsewhere."""
        entry = self._in_flight.pop(sequence, None)
        if entry is not None:
            self._in_flight_tokens -= entry[0]
            if refresh:
                self.refresh()

    def restart(self, incarnation: int) -> None:
        """A new process: what the earlier one had is gone."""
        self.incarnation = incarnation
        self.buried = False
        self.summary = None
        self.withdrawn = False
        self._summaries = 0
        self._in_flight.clear()
        self._in_flight_tokens = 0

    def take_summary(self, summary: InstanceSummary) -> None:
        """Stores a fresh summary and lets go of what it covers."""
        self.summary = summary
        self.withdrawn = False
        self._summaries += 1
        if self._in_flight:
            number = self._summaries
            for sequence in [s for s, (_, due) in self._in_flight.items() if 0 <= due <= number]:
                self._in_flight_tokens -= self._in_flight.pop(sequence)[0]
        self.refresh()

    def refresh(self) -> None:
        """Builds the view anew and patches it into the stages' lists."""
        s = self.summary
        flights = len(self._in_flight)
        if s is None:
            self.view = InstanceView(
                name=self.name, in_flight_sequences=flights, in_flight_tokens=self._in_flight_tokens
            )
        else:
            self.view = InstanceView(
                name=self.name,
                known=True,
                running=s.running,
                waiting=s.waiting,
                running_tokens=s.running_tokens,
                waiting_prefill_tokens=s.waiting_prefill_tokens,
                used_tokens=(s.blocks_total - s.blocks_free) * s.block_size,
                total_tokens=s.blocks_total * s.block_size,
                in_flight_sequences=flights,
                in_flight_tokens=self._in_flight_tokens,
            )
        for stage in self.stages:
            stage.patch(self)

    def check_invariants(self) -> None:
        """Raises AssertionError where the sums are wrong."""
        assert self._in_flight_tokens == sum(tokens for tokens, _ in self._in_flight.values())
        assert self.usable == (not self.why_not())


class StageList:
    """The usable views of one stage, in order of name."""

    __slots__ = ("_positions", "_tuple", "_views", "instances", "length_max", "length_min", "name")

    def __init__(self, stage: Stage, instances: list[Instance]) -> None:
        self.name = stage.name
        self.length_min = stage.length_min
        self.length_max = stage.length_max
        self.instances = instances
        self._views: list[InstanceView] = []
        self._positions: dict[str, int] = {}
        self._tuple: tuple[InstanceView, ...] | None = None
        self.rebuild()

    def covers(self, length_tokens: int) -> bool:
        """Whether sequences of that length belong here."""
        return self.length_min <= length_tokens and (self.length_max is None or length_tokens < self.length_max)

    def rebuild(self) -> None:
        """Someone became usable, or is no longer."""
        usable = [i for i in self.instances if i.usable]
        self._views = [i.view for i in usable]
        self._positions = {i.name: position for position, i in enumerate(usable)}
        self._tuple = None

    def patch(self, instance: Instance) -> None:
        """One instance has a new view."""
        position = self._positions.get(instance.name)
        if position is not None:
            self._views[position] = instance.view
            self._tuple = None

    def candidates(self) -> tuple[InstanceView, ...]:
        """All usable views."""
        if self._tuple is None:
            self._tuple = tuple(self._views)
        return self._tuple

    def filtered(self) -> Iterator[CandidateScore]:
        """Those that are not usable, with the reason."""
        return (CandidateScore(i.name, 0.0, i.why_not()) for i in self.instances if not i.usable)


class Cluster:
    """All instances and plans. Only facts come in; who loses what is told by the return values."""

    def __init__(self) -> None:
        self.instances: dict[str, Instance] = {}
        self.plans: dict[str, Plan] = {}
        self._once_planned: set[str] = set()
        self._unconfirmed: set[str] = set()  # models whose plan the store may have lost: any epoch replaces it
        self.ignored = 0
        self._stages: dict[str, list[StageList]] = {}
        self._keys: dict[str, str] = {}  # KV key -> model
        self._lengths: dict[str, tuple[int, int] | None] = {}  # by model, filled when asked for

    def take_plan(self, key: str, plan: Plan | None) -> None:
        """A plan is new, changed or gone. One of an older epoch than the known one is ignored and counted.

        Nobody deletes plans, so one that is gone was lost with the store: the last one holds until the coordinator has
        written one again, whose epochs may begin anew.
        """
        if plan is None:
            model = self._keys.pop(key, None)
            if model is not None:
                self._unconfirmed.add(model)
            return
        known = self.plans.get(plan.model)
        if known is not None and plan.epoch < known.epoch and plan.model not in self._unconfirmed:
            self.ignored += 1
            return
        self._unconfirmed.discard(plan.model)
        self._keys[key] = plan.model
        self.plans[plan.model] = plan
        self._relist(plan.model)

    def take_record(self, name: str, record: InstanceRecord | None, now_ns: int) -> bool:
        """A registration is new, changed or gone. True if this says that an earlier incarnation is lost.

        A new incarnation counts as a sign of life; a repeated record does not (it may be read from the store long
        after the process ended), and a record that is gone says nothing: summaries do.
        """
        if record is None:
            instance = self.instances.get(name)
            if instance is not None:
                instance.record = None
                self._lengths.clear()
            return False
        if record.instance != name:
            self.ignored += 1
            return False
        instance = self._instance(name)
        if instance is None or record.incarnation < instance.incarnation:
            self.ignored += 1
            return False
        restarted = self._meet(instance, record.incarnation, now_ns)
        if record != instance.record:  # else it was renewed, as every few seconds
            instance.record = record
            self._lengths.clear()
        return restarted

    def take_summary(self, summary: InstanceSummary, now_ns: int) -> bool:
        """A heartbeat. True if it says that an earlier incarnation is lost. Replayed and late ones are ignored."""
        instance = self.instances.get(summary.instance) or self._instance(summary.instance)
        if instance is None or summary.incarnation < instance.incarnation:
            self.ignored += 1
            return False
        restarted = False
        if summary.incarnation > instance.incarnation:
            restarted = self._meet(instance, summary.incarnation, now_ns)
        elif instance.buried or (instance.summary is not None and summary.at_ns <= instance.summary.at_ns):
            self.ignored += 1
            return False
        instance.heard_ns = now_ns
        instance.dead = False
        instance.take_summary(summary)
        self._judge(instance)
        return restarted

    def meet(self, name: str, incarnation: int, now_ns: int) -> bool:
        """An incarnation showed itself by its tokens. True if that says that an earlier one is lost."""
        instance = self._instance(name)
        return instance is not None and incarnation > instance.incarnation and self._meet(instance, incarnation, now_ns)

    def lose(self, instance: Instance) -> None:
        """It is dead or silent: no new work until it is heard again."""
        instance.dead = True
        self._judge(instance)

    def bury(self, instance: Instance) -> None:
        """Its process ended: summaries of this incarnation that are still under way mean nothing."""
        instance.buried = True
        self.lose(instance)

    def withdraw(self, instance: Instance) -> None:
        """It handed sequences back: no new work until its next summary."""
        instance.withdrawn = True
        self._judge(instance)

    def silent(self, now_ns: int, silence_ns: int) -> list[Instance]:
        """Instances that count as alive and were not heard for so long."""
        return [i for i in self.instances.values() if not i.dead and now_ns - i.heard_ns > silence_ns]

    def pardon(self, now_ns: int) -> None:
        """The bus is back: silence so far was its fault, and its store may have lost the plans."""
        self._unconfirmed.update(self.plans)
        for instance in self.instances.values():
            instance.heard_ns = max(instance.heard_ns, now_ns)

    def knows(self, model: str) -> bool:
        """Whether the model has a plan or an instance that registered for it."""
        return model in self.plans or any(i.record and i.record.model == model for i in self.instances.values())

    def expects(self, model: str) -> bool:
        """Whether an instance may come for this model: a plan named one, now or at any time since this ingress began.

        When the last instance dies the plan goes empty until it is back, which takes seconds; calls wait for that.
        """
        return model in self._once_planned

    def stages(self, model: str, length_tokens: int) -> list[StageList]:
        """The stages to look in, in order: the one of that length, then all others (better served than refused)."""
        stages = self._stages.get(model, [])
        if len(stages) == 1:
            return stages
        return sorted(stages, key=lambda s: not s.covers(length_tokens))

    def lengths(self, model: str) -> tuple[int, int] | None:
        """Longest sequence that every, and that any, registered instance takes, tokens; None where none registered."""
        if model not in self._lengths:
            known = [i.record for s in self._stages.get(model, ()) for i in s.instances if i.record is not None]
            limits = [record.max_model_len for record in known]
            self._lengths[model] = (min(limits), max(limits)) if limits else None
        return self._lengths[model]

    def length_max(self, model: str) -> int | None:
        """Longest sequence that any registered instance of the model takes, tokens; None where none registered."""
        lengths = self.lengths(model)
        return None if lengths is None else lengths[1]

    def usable(self, model: str) -> int:
        """Number of instances that take new work."""
        return len({i.name for s in self._stages.get(model, ()) for i in s.instances if i.usable})

    def check_invariants(self) -> None:
        """Raises AssertionError where views and lists are not what the facts say."""
        for instance in self.instances.values():
            instance.check_invariants()
        for model, stages in self._stages.items():
            assert model in self.plans
            for stage in stages:
                assert stage.candidates() == tuple(i.view for i in stage.instances if i.usable)

    def _instance(self, name: str) -> Instance | None:
        instance = self.instances.get(name)
        if instance is not None or not name:
            return instance
        if len(self.instances) >= INSTANCES_MAX:
            self._forget_strangers()
        if len(self.instances) < INSTANCES_MAX:
            instance = self.instances[name] = Instance(name)
        return instance

    def _forget_strangers(self) -> None:
        """Drops who is in no plan, has not registered and was never given anything."""
        strangers = [i.name for i in self.instances.values() if not (i.stages or i.record or i.used)]
        for name in strangers:
            del self.instances[name]
        self.ignored += len(strangers)

    def _meet(self, instance: Instance, incarnation: int, now_ns: int) -> bool:
        """True if an earlier incarnation is lost by it."""
        if incarnation == instance.incarnation:
            return False
        restarted = instance.incarnation != 0
        instance.restart(incarnation)
        instance.heard_ns = now_ns
        instance.dead = False
        instance.refresh()
        self._judge(instance)
        return restarted

    def _judge(self, instance: Instance) -> None:
        usable = not instance.why_not()
        if usable != instance.usable:
            instance.usable = usable
            for stage in instance.stages:
                stage.rebuild()

    def _relist(self, model: str) -> None:
        for stage in self._stages.pop(model, []):
            for instance in stage.instances:
                instance.stages.remove(stage)
        plan = self.plans.get(model)
        if plan is None:
            return
        lists = []
        for planned in plan.stages:
            found = [self._instance(name) for name in sorted(set(planned.instances))]
            listed = StageList(planned, [i for i in found if i is not None])
            for instance in listed.instances:
                instance.stages.append(listed)
            lists.append(listed)
            if listed.instances:
                self._once_planned.add(model)
        self._stages[model] = lists
        self._lengths.clear()
