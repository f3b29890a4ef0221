"""Cluster view of an ingress: plans and instances, from what they publish. Return values name lost incarnations."""

from __future__ import annotations

from millrace.contracts.broker import BoundaryMoved
from millrace.contracts.plan import InstanceRole, Plan, Stage
from millrace.contracts.status import InstanceRecord, InstanceSummary

from services.ingress.cluster.instances import DEFAULT_LIMITS, HangLimits, KnownInstance, StageCandidates
from services.ingress.cluster.stage_routing import StageBoundaries, in_order

#: Instances known at once. A cluster has hundreds; beyond it unknown ones are forgotten, then more are ignored.
INSTANCES_MAX = 4_096


class IngressClusterView:
    """All instances and plans. Methods take observations; their return values say that an incarnation is lost."""

    def __init__(self, hang_limits: HangLimits = DEFAULT_LIMITS) -> None:
        self._hang_limits = hang_limits
        self.instances: dict[str, KnownInstance] = {}
        self.plans: dict[str, Plan] = {}
        self._once_planned: set[str] = set()
        self._unconfirmed: set[str] = set()  # models whose plan the store may have lost: any epoch replaces it
        self.ignored = 0
        self._stages: dict[str, list[StageCandidates]] = {}
        self._boundaries = StageBoundaries()
        self._keys: dict[str, str] = {}  # KV key -> model
        self._lengths: dict[str, tuple[int, int] | None] = {}  # by model, filled when asked for
        self._block_sizes: dict[str, int] = {}  # the same
        self._usable: dict[str, int] = {}  # the same

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

    def take_boundary(self, body: BoundaryMoved) -> None:
        """A keeper told where a stage ends now. One of other cuts, or older than the known one, is ignored."""
        plan = self.plans.get(body.model)
        if plan is None or not self._boundaries.take(body, plan):
            return
        self._boundaries.apply(plan, self._stages.get(body.model, []))

    def take_record(self, name: str, record: InstanceRecord | None, now_ns: int) -> bool:
        """A registration is new, changed or gone. True if this says that an earlier incarnation is lost.

        A new incarnation counts as a sign of life; a repeated record does not (it may be read from the store long
        after the process ended), and a record that is gone says nothing: summaries do.
        """
        if record is None:
            instance = self.instances.get(name)
            if instance is not None:
                instance.record = None
                self._forget_limits()
            return False
        if record.instance != name:
            self.ignored += 1
            return False
        instance = self._instance(name)
        if instance is None or record.incarnation < instance.incarnation:
            self.ignored += 1
            return False
        restarted = self._observe(instance, record.incarnation, now_ns)
        if record != instance.record:  # else it was renewed, as every few seconds
            instance.record = record
            self._forget_limits()
        return restarted

    def take_summary(self, summary: InstanceSummary, now_ns: int) -> bool:
        """A heartbeat. True if it says that an earlier incarnation is lost. Replayed and late ones are ignored."""
        instance = self.instances.get(summary.instance) or self._instance(summary.instance)
        if instance is None or summary.incarnation < instance.incarnation:
            self.ignored += 1
            return False
        restarted = False
        if summary.incarnation > instance.incarnation:
            restarted = self._observe(instance, summary.incarnation, now_ns)
        elif instance.ended or (instance.summary is not None and summary.at_ns <= instance.summary.at_ns):
            self.ignored += 1
            return False
        instance.heard_ns = now_ns
        instance.dead = False
        instance.take_summary(summary, self._hang_limits)
        self._judge(instance)
        return restarted

    def observe_incarnation(self, name: str, incarnation: int, now_ns: int) -> bool:
        """Take an incarnation seen in a token message. True if an earlier one is lost by it."""
        instance = self._instance(name)
        return (
            instance is not None and incarnation > instance.incarnation and self._observe(instance, incarnation, now_ns)
        )

    def lose(self, instance: KnownInstance) -> None:
        """It is dead or silent: no new work until its next summary."""
        instance.dead = True
        self._judge(instance)

    def mark_dead(self, instance: KnownInstance) -> None:
        """Its process ended: ignore summaries of this incarnation that are still in transit."""
        instance.ended = True
        self.lose(instance)

    def withdraw(self, instance: KnownInstance) -> None:
        """It returned sequences or has no subscription: no new work until its next summary."""
        instance.withdrawn = True
        self._judge(instance)

    def silent(self, now_ns: int, silence_ns: int) -> list[KnownInstance]:
        """Instances that count as alive and were not heard for so long."""
        return [i for i in self.instances.values() if not i.dead and now_ns - i.heard_ns > silence_ns]

    def hung(self) -> list[KnownInstance]:
        """Instances whose engine process gives no sign of life."""
        return [i for i in self.instances.values() if i.hang and i.summary is not None and i.summary.engine_silent_ns]

    def reset_liveness(self, now_ns: int) -> None:
        """Restart liveness timers after a reconnect; the KV store may have lost the plans."""
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

    def stages(self, model: str, length_tokens: int) -> list[StageCandidates]:
        """The lists to look in, in order: the stage of that length, longer ones, shorter ones (better served than
        refused); after all of them those that only decode.
        """
        stages = self._stages.get(model, [])
        if len(stages) == 1:
            return stages
        return in_order(stages, length_tokens)

    def lengths(self, model: str) -> tuple[int, int] | None:
        """Longest sequence that every, and that any, registered instance takes, tokens; None where none registered."""
        if model not in self._lengths:
            known = [i.record for s in self._stages.get(model, ()) for i in s.instances if i.record is not None]
            limits = [record.max_model_len for record in known]
            self._lengths[model] = (min(limits), max(limits)) if limits else None
        return self._lengths[model]

    def cached_block_size(self, model: str) -> int:
        """Tokens of one block in the prefix caches of the model's instances, the smallest where they differ; 0 where
        no registered instance has one.
        """
        if model not in self._block_sizes:
            known = [i.record for s in self._stages.get(model, ()) for i in s.instances if i.record is not None]
            sizes = [record.block_size for record in known if record.prefix_caching and record.block_size > 0]
            self._block_sizes[model] = min(sizes, default=0)
        return self._block_sizes[model]

    def length_max(self, model: str) -> int | None:
        """Longest sequence that any registered instance of the model takes, tokens; None where none registered."""
        lengths = self.lengths(model)
        return None if lengths is None else lengths[1]

    def usable(self, model: str) -> int:
        """Number of instances that take new work."""
        if model not in self._usable:
            usable = {i.name for s in self._stages.get(model, ()) for i in s.instances if i.usable}
            self._usable[model] = len(usable)
        return self._usable[model]

    def check_invariants(self) -> None:
        """Raises AssertionError where views and lists are not what the facts say."""
        for instance in self.instances.values():
            instance.check_invariants()
        for model, stages in self._stages.items():
            assert model in self.plans
            for stage in stages:
                assert stage.candidates() == tuple(i.view for i in stage.instances if i.usable)
            if model in self._usable:
                assert self._usable[model] == len({i.name for s in stages for i in s.instances if i.usable})

    def _instance(self, name: str) -> KnownInstance | None:
        instance = self.instances.get(name)
        if instance is not None or not name:
            return instance
        if len(self.instances) >= INSTANCES_MAX:
            self._forget_unknown()
        if len(self.instances) < INSTANCES_MAX:
            instance = self.instances[name] = KnownInstance(name)
        return instance

    def _forget_unknown(self) -> None:
        """Drop instances that are in no plan, have not registered and were never used."""
        unknown = [i.name for i in self.instances.values() if not (i.stages or i.record or i.used)]
        for name in unknown:
            del self.instances[name]
        self.ignored += len(unknown)

    def _observe(self, instance: KnownInstance, incarnation: int, now_ns: int) -> bool:
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

    def _forget_limits(self) -> None:
        """Registrations changed: forget what was derived from them."""
        self._lengths.clear()
        self._block_sizes.clear()

    def _judge(self, instance: KnownInstance) -> None:
        usable = not instance.why_not()
        if usable != instance.usable:
            instance.usable = usable
            self._usable.clear()
            for stage in instance.stages:
                stage.rebuild()

    def _relist(self, model: str) -> None:
        self._usable.clear()
        for stage in self._stages.pop(model, []):
            for instance in stage.instances:
                instance.stages.remove(stage)
        plan = self.plans.get(model)
        if plan is None:
            return
        lists: list[StageCandidates] = []
        for planned in plan.stages:
            found = [i for name in sorted(set(planned.instances)) if (i := self._instance(name)) is not None]
            lists += _listed(planned, found)
            if found:
                self._once_planned.add(model)
        self._boundaries.apply(plan, lists)
        self._stages[model] = lists
        self._forget_limits()


def _listed(planned: Stage, instances: list[KnownInstance]) -> list[StageCandidates]:
    """A stage as one or two lists: instances that take new requests, and those that only decode."""
    decoding = [i for i in instances if planned.roles.get(i.name) is InstanceRole.DECODE]
    lists = [StageCandidates(planned, [i for i in instances if i not in decoding])]
    if decoding:
        lists.append(StageCandidates(planned, decoding, decodes=True))
    for listed in lists:
        for instance in listed.instances:
            instance.stages.append(listed)
    return lists
