"""Leases of models: who may write one, and when; and what is done about a key that cannot be read."""

from __future__ import annotations

from millrace.actor.effects import DeleteKey, Effect, PutKey
from millrace.contracts.local import KeyUnreadable
from millrace.contracts.plan import Lease
from millrace.contracts.subjects import subject_token

from services.coordinator.state import ModelState

#: How long a lease holds. A JetStream write may take over 5 s while a stream leader is replaced; the lease must
#: outlive that.
LEASE_NS = 15_000_000_000

#: A holder renews its lease when less than this is left of it: three more tries fit before it ends.
LEASE_RENEW_NS = 11_000_000_000


def may_write_lease(lease: Lease | None, *, name: str, incarnation: int, now_ns: int) -> bool:
    """Whether a coordinator may take a lease, or should renew its own."""
    if lease is None or lease.until_ns <= now_ns:
        return True
    # The same name is the same service: after a crash it need not wait for its own lease to end.
    return lease.holder == name and (lease.until_ns - now_ns < LEASE_RENEW_NS or lease.incarnation != incarnation)


def put_lease(model: str, state: ModelState, *, name: str, incarnation: int, now_ns: int) -> PutKey:
    """Writes a lease over the revision that was seen."""
    lease = Lease(model=model, holder=name, incarnation=incarnation, until_ns=now_ns + LEASE_NS)
    return PutKey(
        bucket="lease",
        key=subject_token(model),
        value=lease,
        correlation=f"lease/{model}",
        expected_revision=state.lease_key.revision,
    )


def replace_unreadable(body: KeyUnreadable) -> list[Effect]:
    """Deletes it, and only it: what was lost is written anew. Instances write their own keys again by themselves."""
    if body.bucket == "instance":
        return []
    correlation = f"unreadable/{body.key}"
    return [DeleteKey(bucket=body.bucket, key=body.key, correlation=correlation, expected_revision=body.revision)]
