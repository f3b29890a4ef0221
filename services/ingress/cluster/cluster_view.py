"""Cluster view of an ingress: plans and instances, from what they publish. Return values name lost incarnations."""

from __future__ import annotations

from millrace.contracts.broker import BoundaryMoved
from millrace.contracts.plan import InstanceRole, Plan, Stage
from millrace.contracts.status import InstanceRecord, InstanceSummary, ServicePresence
from millrace.contracts.subjects import subject_token
from millrace.contracts.worker import Adapter
from millrace.membership.config import MembershipConfig
from millrace.membership.member import Member, MemberState
from millrace.membership.members import Membership, MembershipChange

from services.ingress.cluster.instances import KnownInstance, StageCandidates
from services.ingress.cluster.stage_routing import StageBoundaries, in_order

#: Instances that are named where none takes work.
REASONS_MAX = 3


class IngressClusterView:
    """All instances and plans. Methods take observations; their return values say that an incarnation is lost.

    Attributes:
        instances: By name. Beyond ``members_max`` those in no plan that have not registered and were never used make
            room, then more are ignored.
        adapters: LoRA adapters by name, each with its model: those that an instance's record told until it told them no
            longer. They outlive an instance, since another one loads them when a sequence comes.
        store_ill: Reason why the store takes no writes for lack of room, as the supervisor says; empty where it does.
    """

    def __init__(self, hang_ns: int = 500_000_000, membership: MembershipConfig | None = None) -> None:
        self._hang_ns = hang_ns
        self.members = Membership.of(membership or MembershipConfig(), expendable=self._expendable)
        self.instances: dict[str, KnownInstance] = {}
        self.plans: dict[str, Plan] = {}
        self.adapters: dict[str, tuple[str, Adapter]] = {}
        self.store_ill = ""
        self.plans_read = False  # each plan that there was when this ingress began
        self._unconfirmed: set[str] = set()  # models whose plan the store may have lost: any epoch replaces it
        self._stages: dict[str, list[StageCandidates]] = {}
        self._boundaries = StageBoundaries()
        self._keys: dict[str, str] = {}  # KV key -> model
        self._lengths: dict[str, tuple[int, int] | None] = {}  # by model, filled when asked for
        self._block_sizes: dict[str, int] = {}  # the same
        self._usable: dict[str, int] = {}  # the same

    def take_plan(self, key: str, plan: Plan | None) -> None:
        """A plan is new, changed or gone. One of an older epoch than the known one is ignored.

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

    def take_record(self, key: str, record: InstanceRecord | None, now_ns: int) -> bool:
        """A registration is new, changed or gone. True if this says that an earlier incarnation is lost."""
        if record is not None and not self._registers(key, record):
            return False
        before = self.instances[record.instance].member.record if record is not None else None
        change = self.members.on_record(key, record, now_ns)
        if record is not None and change.member is not None and change.member.record is record:
            self._take_adapters(record, before)
        if change.rerecorded:  # else it was renewed, as every few seconds
            self._forget_limits()
        return self._take(change)

    def _take_adapters(self, record: InstanceRecord, before: InstanceRecord | None) -> None:
        if before is not None and before.incarnation != record.incarnation:
            before = None
        known, now = (before.adapters or [] if before is not None else []), record.adapters or []
        for adapter in now:
            if adapter not in known:
                self.adapters[adapter.name] = record.model, adapter
        for name in {adapter.name for adapter in known} - {adapter.name for adapter in now}:
            if not any(name in (each.name for each in other.adapters or []) for other in self._records(record.model)):
                self.adapters.pop(name, None)

    def taking_adapters(self, model: str) -> tuple[str, ...]:
        """Instances of a model that load LoRA adapters."""
        records = [record for record in self._records(model) if record.adapters is not None]
        return tuple(record.instance for record in records if not self.instances[record.instance].dead)

    def take_summary(self, summary: InstanceSummary, now_ns: int) -> bool:
        """A heartbeat. True if it says that an earlier incarnation is lost. Replayed and late ones are ignored."""
        instance = self._instance(summary.instance)
        if instance is None:
            return False
        change = self.members.on_summary(summary, now_ns)
        if change.restarted:
            instance.restart()
        if change.accepted:
            instance.take_summary(summary, self._hang_ns)
            self._judge(instance)
        return change.restarted

    def take_presence(self, presence: ServicePresence) -> KnownInstance | None:
        """A worker's presence. Returns the instance if this says that its process has ended."""
        change = self.members.on_presence(presence)
        if change.member is None or not change.moved:
            return None
        self._take(change)
        if change.member.state is not MemberState.DEAD:
            return None
        return self.instances[change.member.name]

    def observe_incarnation(self, name: str, incarnation: int, now_ns: int) -> bool:
        """Take an incarnation seen in a token message. True if an earlier one is lost by it."""
        return self._instance(name) is not None and self._take(self.members.observe(name, incarnation, now_ns))

    def came_whole(self, name: str) -> bool:
        """Whether all that ended with this instance's process is back: else the first would get all that waits."""
        member = self.members.find(name)
        ended = member.dead_through if member is not None else 0
        return not (ended and any(each.dead_through == ended >= each.incarnation for each in self.members))

    def withdraw(self, instance: KnownInstance) -> None:
        """It returned sequences or has no subscription: no new work until its next summary."""
        self._take(self.members.withdraw(instance.name))

    def expire(self, now_ns: int) -> list[KnownInstance]:
        """Instances that have just fallen silent: no new work until their next summary."""
        silent = [self.instances[member.name] for member in self.members.expire(now_ns)]
        for instance in silent:
            self._judge(instance)
        return silent

    def hung(self) -> list[KnownInstance]:
        """Instances whose engine process gives no sign of life."""
        hanging = (i for i in self.instances.values() if i.hang)
        return [i for i in hanging if i.member.summary is not None and i.member.summary.engine_silent_ns]

    def reset_liveness(self, now_ns: int) -> None:
        """Restart liveness timers after a reconnect; the KV store may have lost the plans."""
        self._unconfirmed.update(self.plans)
        self.members.restart_timers(now_ns)

    def expects(self, model: str) -> bool:
        """Whether an instance may come for this model: it has a plan, or plans have not been read yet.

        When the last instance dies the plan goes empty until it is back, which takes seconds; calls wait for that.
        """
        return not self.plans_read or model in self.plans

    def why_none_comes(self, model: str) -> str:
        """Reason why no instance comes for it: its plan names none, and none can register. Empty where one may, as
        while plans have not been read.
        """
        if not (self.store_ill and self.plans_read) or any(s.instances for s in self._stages.get(model, ())):
            return ""
        # The server names a file first.
        return f"none can register: JetStream takes no writes ({self.store_ill.rpartition(': ')[2]})"

    def only_stage(self, model: str) -> StageCandidates | None:
        """The list of a model that has just one."""
        stages = self._stages.get(model, ())
        return stages[0] if len(stages) == 1 else None

    def late(self, model: str, tokens: int) -> bool:
        """Whether an instance that takes so many tokens is still registered, and silent here or to the coordinator."""
        able = (m for m, r in self.members.registered() if r.model == model and r.max_model_len >= tokens)
        return any(m.state is MemberState.SILENT or (m.serving and not self.instances[m.name].stages) for m in able)

    def stages(self, model: str, length_tokens: int) -> list[StageCandidates]:
        """The lists to look in, in order: the stage of that length, longer ones, shorter ones (better served than
        refused); after all of them those that only decode.
        """
        return in_order(self._stages.get(model, []), length_tokens)

    def lengths(self, model: str) -> tuple[int, int] | None:
        """Longest sequence that every, and that any, registered instance takes, tokens; None where none registered."""
        if model not in self._lengths:
            known = self._records(model)
            limits = [record.max_model_len for record in known]
            self._lengths[model] = (min(limits), max(limits)) if limits else None
        return self._lengths[model]

    def cached_block_size(self, model: str) -> int:
        """Tokens of one block in the prefix caches of the model's instances, the smallest where they differ; 0 where
        no registered instance has one.
        """
        if model not in self._block_sizes:
            known = self._records(model)
            sizes = [record.block_size for record in known if record.prefix_caching and record.block_size > 0]
            self._block_sizes[model] = min(sizes, default=0)
        return self._block_sizes[model]

    def length_max(self, model: str) -> int | None:
        """Longest sequence that any registered instance of the model takes, tokens; None where none registered."""
        lengths = self.lengths(model)
        return None if lengths is None else lengths[1]

    def usable(self, model: str) -> int:
        if model not in self._usable:
            usable = {i.name for s in self._stages.get(model, ()) for i in s.instances if i.usable}
            self._usable[model] = len(usable)
        return self._usable[model]

    def why_unserved(self, model: str) -> str:
        """Reason why no instance takes new work, where none does."""
        if model not in self.plans:
            return "no plan of it could be read"
        why = [f"{i.name} {i.why_not()}" for s in self._stages.get(model, ()) for i in s.instances if not i.usable]
        more = f" and {len(why) - REASONS_MAX} more" if len(why) > REASONS_MAX else ""
        if why:
            return ", ".join(why[:REASONS_MAX]) + more
        return self.why_none_comes(model) or "its plan names no instance that is registered"

    def check_invariants(self) -> None:
        self.members.check_invariants()
        for instance in self.instances.values():
            instance.check_invariants()
        for model, stages in self._stages.items():
            assert model in self.plans
            for stage in stages:
                stage.check_invariants()
            if model in self._usable:
                assert self._usable[model] == len({i.name for s in stages for i in s.instances if i.usable})

    def check_instance(self, name: str) -> None:
        self.members.check_member(name)
        instance = self.instances.get(name)
        if instance is not None:
            instance.check_invariants()
            for stage in instance.stages:
                stage.check_invariants()

    def _instance(self, name: str) -> KnownInstance | None:
        instance = self.instances.get(name)
        if instance is not None:
            return instance
        if name and self.members.find(name) is not None:
            return None  # another one has the same subjects
        member = self.members.expect(name)
        if member is None:
            return None
        if len(self.instances) >= len(self.members):  # some made room
            self.instances = {n: i for n, i in self.instances.items() if self.members.find(n) is i.member}
        instance = self.instances[name] = KnownInstance(member)
        return instance

    def _registers(self, key: str, record: InstanceRecord) -> bool:
        """Whether the key is the record's own, and there is room for its instance."""
        if not record.instance or subject_token(record.instance) != subject_token(key):
            return False
        return self._instance(record.instance) is not None

    def _expendable(self, member: Member) -> bool:
        """Whether it is in no plan and was never used."""
        instance = self.instances.get(member.name)
        return instance is None or not (instance.stages or instance.used)

    def _take(self, change: MembershipChange) -> bool:
        """Follow a change of a member. True if an earlier incarnation is lost by it."""
        if change.member is None:
            return False
        instance = self.instances[change.member.name]
        if change.restarted:
            instance.restart()
            instance.refresh()
        self._judge(instance)
        return change.restarted

    def _records(self, model: str) -> list[InstanceRecord]:
        """Registrations of the model's planned instances."""
        planned = (i.member.record for s in self._stages.get(model, ()) for i in s.instances)
        return [record for record in planned if record is not None]

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
