"""Leases, and the plans that their holders write: one pair of buckets, for models or for cascades. No I/O.

Owns, per key, the lease and the plan as the store last told them, and whether a write is under way. A plan is written
only under the writer's own unexpired lease and only over the revision that was seen.

| what happened | change | effects |
|---|---|---|
| a key changed | what the store has, whoever wrote it, is taken over | Log where it is no plan or lease |
| a lease is free, has run out, or is this one's and ends soon | | PutKey(lease) |
| KeyUnreadable | | the plan or lease that is known is written over it; else DeleteKey |
| KeyPut, KeyNotPut | the write is over; the watch tells who won | Log |
| BusReconnected, then BucketReady | revisions are unconfirmed; keys that were not told again are gone | |
| StopRequested | | DeleteKey for each lease held |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from millrace.actor.effects import DeleteKey, Effect, Log, PutKey, WatchKeys
from millrace.contracts.local import BucketReady, KeyChanged, KeyNotPut, KeyPut, KeyUnreadable
from millrace.contracts.message import Body
from millrace.contracts.plan import Lease
from millrace.contracts.subjects import subject_token

#: How long a lease holds. A JetStream write may take over 5 s while a stream leader is replaced; the lease must
#: outlive that.
LEASE_NS = 15_000_000_000

#: A holder renews its lease when less than this is left of it: three more tries fit before it ends.
LEASE_RENEW_NS = 11_000_000_000

P = TypeVar("P", bound=Body)


@dataclass
class KeyState:
    """A key in a bucket as this coordinator last saw it.

    Attributes:
        revision: 0 where it does not exist.
        stale: Not confirmed since the bus came back.
        writing: A write is under way; no second one is begun.
    """

    revision: int = 0
    stale: bool = False
    writing: bool = False


@dataclass
class LeasedPlan(Generic[P]):
    """Lease and plan under one key.

    Attributes:
        name: Model or cascade; the key is its token.
        damaged: The stored plan cannot be read.
    """

    name: str
    lease: Lease | None = None
    lease_key: KeyState = field(default_factory=KeyState)
    plan: P | None = None
    plan_key: KeyState = field(default_factory=KeyState)
    damaged: bool = False

    @property
    def lost(self) -> bool:
        """Whether there was a plan, and the store has it no more, or cannot tell it."""
        return self.plan is not None and (self.damaged or not self.plan_key.revision)


class LeasedPlans(Generic[P]):
    """All keys of a pair of buckets.

    Attributes:
        buckets: Of the plans and of the leases.
    """

    def __init__(self, kind: type[P], *, plans: str, leases: str, names_max: int, name: str, incarnation: int) -> None:
        """Knows nothing yet.

        Args:
            plans, leases: Names of the buckets.
            names_max: Keys that are known at once; more are ignored.
        """
        self.buckets = (plans, leases)
        self._kind = kind
        self._names_max = names_max
        self._name = name
        self._incarnation = incarnation
        self._ready: set[str] = set()
        self._known: dict[str, LeasedPlan[P]] = {}

    def __iter__(self) -> Iterator[LeasedPlan[P]]:
        return iter(sorted(self._known.values(), key=lambda each: each.name))

    def __len__(self) -> int:
        return len(self._known)

    @property
    def ready(self) -> bool:
        """Whether the store has told all that it has."""
        return self._ready >= set(self.buckets)

    def find(self, name: str) -> LeasedPlan[P] | None:
        """Lease and plan of a name; None where neither was seen."""
        return self._known.get(subject_token(name))

    def ensure(self, name: str) -> LeasedPlan[P] | None:
        """The same, new where it is not; None where there is no room."""
        known = self.find(name)
        if known is None and len(self._known) < self._names_max:
            known = self._known[subject_token(name)] = LeasedPlan(name)
        return known

    def start(self) -> list[Effect]:
        return [WatchKeys(bucket=bucket) for bucket in self.buckets]

    # what the store says

    def on_key(self, body: KeyChanged, name: str) -> list[Effect]:
        """A plan or a lease changed.

        Args:
            name: What the value says that it is of; empty where it has no value, or one of another type.
        """
        known = self.ensure(name) if name else self._known.get(body.key)
        if known is None:
            return []
        is_plan = body.bucket == self.buckets[0]
        key = known.plan_key if is_plan else known.lease_key
        key.stale, key.writing = False, False
        key.revision = body.revision if body.value is not None else 0
        known.damaged = known.damaged and not is_plan
        usable = isinstance(body.value, self._kind if is_plan else Lease)
        if not is_plan:
            known.lease = body.value if usable else None
        elif usable:
            known.plan = body.value  # nobody deletes a plan: a store that lost it gets it again
        if usable or body.value is None:
            return []
        return [Log(level="warning", event="key_of_wrong_type", fields={"bucket": body.bucket, "key": body.key})]

    def on_unreadable(self, body: KeyUnreadable) -> list[Effect]:
        """A value that is none: what is known is written over it, what is not known is deleted."""
        known = self._known.get(body.key)
        if known is None:
            correlation = f"unreadable/{body.key}"
            return [
                DeleteKey(bucket=body.bucket, key=body.key, correlation=correlation, expected_revision=body.revision)
            ]
        key = known.plan_key if body.bucket == self.buckets[0] else known.lease_key
        key.revision, key.stale, key.writing = body.revision, False, False
        known.damaged = known.damaged or body.bucket == self.buckets[0]
        return []

    def on_put(self, body: KeyPut) -> None:
        """A write is done; the watch tells its value."""
        if (key := self._key(body.correlation)) is not None:
            key.revision, key.writing = max(key.revision, body.revision), False

    def on_not_put(self, body: KeyNotPut) -> list[Effect]:
        """Somebody else was faster; the watch tells the winner, the next tick tries again."""
        if (key := self._key(body.correlation)) is not None:
            key.writing = False
        fields = {"key": body.correlation, "reason": str(body.reason)}
        return [Log(level="info", event="key_not_written", fields=fields)]

    def on_ready(self, body: BucketReady) -> None:
        """All keys of a bucket have been told; one that was not is gone."""
        self._ready.add(body.bucket)
        for known in self._known.values():
            key = {self.buckets[0]: known.plan_key, self.buckets[1]: known.lease_key}.get(body.bucket)
            if key is not None and key.stale:
                key.revision, key.stale = 0, False
                if key is known.lease_key:
                    known.lease = None

    def on_reconnected(self) -> None:
        """Revisions are unconfirmed until the watches say BucketReady."""
        self._ready.clear()
        for known in self._known.values():
            for key in (known.plan_key, known.lease_key):
                key.stale, key.writing = True, False

    # what this coordinator writes

    def leads(self, known: LeasedPlan[P], now_ns: int) -> bool:
        lease = known.lease
        if lease is None or lease.until_ns <= now_ns:
            return False
        return lease.holder == self._name and lease.incarnation == self._incarnation

    def lost(self, known: LeasedPlan[P]) -> bool:
        lease = known.lease
        return lease is not None and (lease.holder, lease.incarnation) != (self._name, self._incarnation)

    def lead(self, now_ns: int) -> list[Effect]:
        """Takes leases that are free, and renews the ones held."""
        if not self.ready:
            return []
        free = [known for known in self if not known.lease_key.writing and self._may_write(known.lease, now_ns)]
        return [self._put_lease(known, now_ns) for known in free]

    def _may_write(self, lease: Lease | None, now_ns: int) -> bool:
        if lease is None or lease.until_ns <= now_ns:
            return True
        # The same name is the same service: after a crash it need not wait for its own lease to end.
        soon = lease.until_ns - now_ns < LEASE_RENEW_NS or lease.incarnation != self._incarnation
        return lease.holder == self._name and soon

    def _put_lease(self, known: LeasedPlan[P], now_ns: int) -> Effect:
        known.lease_key.writing = True
        until_ns = now_ns + LEASE_NS
        lease = Lease(model=known.name, holder=self._name, incarnation=self._incarnation, until_ns=until_ns)
        return self._put(self.buckets[1], known, lease, known.lease_key)

    def may_plan(self, known: LeasedPlan[P], now_ns: int) -> bool:
        """Whether a plan may be written now."""
        return self.ready and self.leads(known, now_ns) and not known.plan_key.writing

    def put(self, known: LeasedPlan[P], plan: P) -> Effect:
        """Writes a plan over the revision that was seen."""
        known.plan_key.writing = True
        return self._put(self.buckets[0], known, plan, known.plan_key)

    def _put(self, bucket: str, known: LeasedPlan[P], value: Body, key: KeyState) -> Effect:
        return PutKey(
            bucket=bucket,
            key=subject_token(known.name),
            value=value,
            correlation=f"{bucket}/{known.name}",
            expected_revision=key.revision,
        )

    def stop(self, now_ns: int) -> list[Effect]:
        """Gives the leases back."""
        bucket = self.buckets[1]
        return [
            DeleteKey(bucket=bucket, key=subject_token(known.name), correlation=f"release/{known.name}")
            for known in self
            if self.leads(known, now_ns)
        ]

    def _key(self, correlation: str) -> KeyState | None:
        bucket, _, name = correlation.partition("/")
        known = self.find(name)
        if known is None:
            return None
        return {self.buckets[0]: known.plan_key, self.buckets[1]: known.lease_key}.get(bucket)
