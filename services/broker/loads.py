"""The load of an instance of ours, as it is told to others and as policies see it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.contracts.broker import LoadReported
from millrace.contracts.status import InstanceRecord, InstanceSummary, SequenceStatus, StatusSnapshot
from millrace.policies.stages.digest import LengthDigest, digest
from millrace.policies.trading import LoadView

from services.broker.forecasts import told_curve
from services.broker.intents import length_of
from services.broker.state import MS, BrokerContext, OwnInstance

#: Points of a load curve.
CURVE_POINTS = 16

#: Characters of the reason in a load.
WHY_MAX = 300

#: Share of a new rate of decoding in the one that is told.
RATE_SHARE = 0.3


def observe_summary(own: OwnInstance, body: InstanceSummary) -> None:
    """Takes a heartbeat: draining or not, and the rate of decoding."""
    before = own.summary
    own.summary = body
    if before is None or before.incarnation != body.incarnation or body.output_tokens_total < own.load.output_total:
        own.load.output_total, own.load.output_at_ns, own.load.tokens_per_s = body.output_tokens_total, body.at_ns, 0.0
        return
    passed_ns = body.at_ns - own.load.output_at_ns
    if passed_ns >= 200 * MS:
        rate = (body.output_tokens_total - own.load.output_total) * 1e9 / passed_ns
        own.load.tokens_per_s += RATE_SHARE * (rate - own.load.tokens_per_s)
        own.load.output_total, own.load.output_at_ns = body.output_tokens_total, body.at_ns


def running_tokens(snapshot: StatusSnapshot) -> int:
    """KV tokens of the running batch."""
    return sum(status.computed_tokens for status in snapshot.running)


def waiting_tokens(waiting: Sequence[SequenceStatus]) -> int:
    """Tokens that the queue will need at least."""
    return sum(length_of(status) for status in waiting)


def present_load(own: OwnInstance) -> LoadView:
    """The load as our own policy sees it, agreed arrivals included."""
    snapshot = own.snapshot
    assert snapshot is not None, "there is no load without a snapshot"
    return LoadView(
        name=own.instance,
        tokens=running_tokens(snapshot),
        waiting_tokens=waiting_tokens(snapshot.waiting),
        queued_tokens=own.promised_tokens,
        running=len(snapshot.running),
        waiting=len(snapshot.waiting),
        blocks_free=snapshot.blocks_free,
        blocks_total=snapshot.blocks_total,
        tokens_per_s=own.load.tokens_per_s,
        curve=own.load.reported.curve if own.load.reported is not None else None,
    )


def renew_load(ctx: BrokerContext, own: OwnInstance, record: InstanceRecord, now_ns: int) -> LoadReported:
    """The load now, with a curve forecast anew where the policy looks at it."""
    snapshot, forecast = own.snapshot, None
    assert snapshot is not None, "there is no load without a snapshot"
    if own.forecasts is not None and ctx.policy.needs_forecast:
        horizon_ns, boundary = ctx.limits.horizon_ms * MS, ctx.view.boundary(own.instance)
        forecast = own.forecasts.curve(snapshot, boundary, now_ns, horizon_ns=horizon_ns, points=CURVE_POINTS)
    stage = ctx.view.stage(own.instance)
    lengths = digest(length_of(status) for status in (*snapshot.running, *snapshot.waiting))
    own.load.at_ns = now_ns
    own.load.reported = LoadReported(
        instance=own.instance,
        incarnation=snapshot.incarnation,
        model=record.model,
        stage=stage.name if stage is not None else "",
        plan_epoch=ctx.view.plan_epoch(record.model),
        at_ns=now_ns,
        tokens=running_tokens(snapshot),
        waiting_tokens=waiting_tokens(snapshot.waiting),
        running=len(snapshot.running),
        waiting=len(snapshot.waiting),
        blocks_free=min(snapshot.blocks_free, snapshot.blocks_total),
        blocks_total=snapshot.blocks_total,
        tokens_per_s=own.load.tokens_per_s,
        queued_tokens=own.promised_tokens,
        length_counts=list(lengths.counts),
        length_tokens=list(lengths.tokens),
        draining=own.draining,
        memory_risk=own.load.memory_risk,
        curve=told_curve(forecast),
        why=own.load.why[:WHY_MAX],
    )
    return own.load.reported


def digest_of(body: LoadReported) -> LengthDigest:
    """The histogram in a load. Raises ValueError where it is none."""
    return LengthDigest(tuple(body.length_counts), tuple(body.length_tokens))
