"""Every wire type and every subject, once: the source of the codec, the AsyncAPI document, NATS permissions and
`tap`.
"""

from __future__ import annotations

from millrace.contracts.broker import AskForMove, BoundaryMoved, LoadsReported, MoveBid
from millrace.contracts.cascade import CascadePlan
from millrace.contracts.channels import Bucket, Channel, Pattern, Role, bucket, channel
from millrace.contracts.coordinator import OrderAccepted, OrderRefused, PlanProposed, SetInstances, SetRole
from millrace.contracts.ingress import (
    FindRequests,
    RequestsFound,
    SequencesReturned,
    TokensGenerated,
    TokensResent,
)
from millrace.contracts.judge import AnswerJudged, JudgeAnswer
from millrace.contracts.leases import (
    EndLease,
    FreezeSequence,
    KvLeased,
    KvPulled,
    KvRefused,
    LeaseKv,
    MigrationPrepared,
    PrepareMigration,
    PullKv,
    SequenceFrozen,
    UnreserveKv,
)
from millrace.contracts.message import Body
from millrace.contracts.migration import (
    AllotEpoch,
    EpochAllotted,
    EvacuateInstance,
    InstanceEvacuated,
    KvReplicated,
    MigrateSequence,
    MigrationFinished,
    MoveSequence,
    SequenceMoved,
)
from millrace.contracts.observers import DecisionMade, ProvisioningDecided, RequestFinished
from millrace.contracts.plan import Lease, Plan
from millrace.contracts.predictor import LatencyPrediction, NoPrediction, PredictLatency
from millrace.contracts.provisioner import ClusterCompared, InstanceOrdered, StartInstance, StopInstance, UpdateCluster
from millrace.contracts.responses import ResponseEvents, StoredResponse
from millrace.contracts.status import InstanceRecord, InstanceSummary, ServicePresence, StatusSnapshot
from millrace.contracts.tagger import LengthTag, TagRequest
from millrace.contracts.worker import (
    AcknowledgeSequences,
    AdapterChanged,
    CancelSequence,
    ChangeAdapter,
    DrainWorker,
    ResendTokens,
    ReturnSequences,
    SequenceAccepted,
    SequenceRefused,
    SetStepBudget,
    SubmitSequence,
)

__all__ = ["BUCKETS", "CHANNELS", "WIRE_TYPES", "Bucket", "Channel", "Pattern", "Role"]

#: Roles that say that they are there.
_SERVICES = ", ".join(role for role in Role if role not in (Role.OPERATOR, Role.OBSERVER))

CHANNELS: tuple[Channel, ...] = (
    channel("tag.{model}", "ingress > one tagger", TagRequest, LengthTag),
    channel("predict.{model}.{instance}", "ingress > one predictor", PredictLatency, LatencyPrediction, NoPrediction),
    channel("judge.{cascade}", "ingress > one judge", JudgeAnswer, AnswerJudged),
    channel(
        "engine.{instance}.submit", "ingress, migrator > worker", SubmitSequence, SequenceAccepted, SequenceRefused
    ),
    channel("engine.{instance}.cancel", "ingress > worker", CancelSequence),
    channel("engine.{instance}.resend", "ingress > worker", ResendTokens, TokensResent),
    channel("engine.{instance}.acknowledge", "ingress > worker", AcknowledgeSequences),
    channel("engine.{instance}.adapter", "ingress > worker", ChangeAdapter, AdapterChanged),
    channel("engine.{instance}.drain", "coordinator, supervisor, operator > worker", DrainWorker),
    channel("engine.{instance}.budget", "coordinator > worker", SetStepBudget),
    channel("engine.{instance}.return", "broker > worker", ReturnSequences),
    channel("engine.{instance}.lease", "migrator > worker", LeaseKv, KvLeased, KvRefused),
    channel("engine.{instance}.freeze", "migrator > worker", FreezeSequence, SequenceFrozen, KvLeased, KvRefused),
    channel("engine.{instance}.end", "migrator > worker", EndLease),
    channel("engine.{instance}.prepare", "migrator > worker", PrepareMigration, MigrationPrepared, KvRefused),
    channel("engine.{instance}.pull", "migrator > worker", PullKv, KvPulled, KvRefused),
    channel("engine.{instance}.unreserve", "migrator > worker", UnreserveKv),
    channel("tokens.{ingress}", "worker > ingress", TokensGenerated),
    channel("returned.{ingress}", "worker > ingress", SequencesReturned),
    channel("moved.{ingress}", "worker > ingress", SequenceMoved),
    channel("find", "operator > every ingress", FindRequests, RequestsFound),
    channel("status.{model}.{instance}", "worker > coordinator, predictor, migrator, broker", StatusSnapshot),
    channel(
        "summary.{model}.{instance}", "worker > ingress, coordinator, predictor, migrator, broker", InstanceSummary
    ),
    channel(
        "presence.{role}.{name}",
        f"{_SERVICES} > ingress, worker, coordinator, predictor, migrator, broker",
        ServicePresence,
    ),
    channel("decision.{model}", "ingress, coordinator > observer, predictor, coordinator", DecisionMade),
    channel("outcome.{model}", "ingress > tagger, predictor, coordinator", RequestFinished),
    channel("provisioning.{model}", "coordinator > observer", ProvisioningDecided),
    channel(
        "provision.{host}.start", "coordinator, operator > supervisor", StartInstance, InstanceOrdered, OrderRefused
    ),
    channel("provision.{host}.stop", "coordinator, operator > supervisor", StopInstance, InstanceOrdered, OrderRefused),
    channel("provision.{host}.update", "operator > supervisor", UpdateCluster, ClusterCompared),
    channel("coordinate.{model}.role", "operator > coordinator", SetRole, OrderAccepted, OrderRefused),
    channel("coordinate.{model}.scale", "operator > coordinator", SetInstances, OrderAccepted, OrderRefused),
    channel("coordinate.{model}.propose", "coordinator > coordinator, observer", PlanProposed),
    channel("load.{model}.{stage}", "broker > broker, coordinator, migrator", LoadsReported),
    channel("ask.{model}.{instance}", "broker > broker", AskForMove),
    channel("bid.{source}.{bidder}", "broker > broker, worker", MoveBid),
    channel("boundary.{model}.{stage}", "broker > broker, ingress, coordinator", BoundaryMoved),
    channel("epoch.{ingress}", "migrator > ingress", AllotEpoch, EpochAllotted, KvRefused),
    channel("replicated.{ingress}", "migrator > ingress", KvReplicated),
    channel("migrate.{instance}.start", "operator, coordinator > broker", MigrateSequence, MigrationFinished),
    channel(
        "migrate.{instance}.evacuate", "worker, operator, coordinator > broker", EvacuateInstance, InstanceEvacuated
    ),
    channel("migrate.{instance}.move", "broker > migrator", MoveSequence, MigrationFinished),
    channel(
        "migration.{model}.{source}.{target}", "migrator > observer, coordinator, broker, predictor", MigrationFinished
    ),
)

#: How long responses can be asked for, seconds, and how much of them is kept.
_RESPONSES = {"private": True, "ttl_s": 86_400.0, "bytes_max": 128 << 20}

BUCKETS: tuple[Bucket, ...] = (
    bucket("plan", "{model}", "coordinator > coordinator, ingress, migrator, broker, observer", Plan),
    bucket(
        "instance",
        "{instance}",
        "worker > coordinator, ingress, migrator, broker, predictor, observer",
        InstanceRecord,
        ttl_s=10.0,
    ),
    bucket(
        "cascade",
        "{cascade}",
        "coordinator, operator > coordinator, ingress, judge, supervisor, observer",
        CascadePlan,
    ),
    bucket("cascade_lease", "{cascade}", "coordinator > coordinator", Lease),
    bucket("lease", "{model}", "coordinator > coordinator", Lease),
    bucket("response", "{response}", "ingress > ingress", StoredResponse, **_RESPONSES),
    bucket("response_log", "{response}.{n}", "ingress > ingress", ResponseEvents, **_RESPONSES),
)

#: Every type that a channel or a bucket carries, by name.
WIRE_TYPES: tuple[type[Body], ...] = tuple(
    sorted(
        {
            *(kind for each in CHANNELS for kind in (each.message, *each.replies)),
            *(kept.value for kept in BUCKETS),
        },
        key=lambda kind: kind.__name__,
    )
)
