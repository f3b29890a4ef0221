"""Every wire type and every subject, once: the source of the codec, the AsyncAPI document, NATS permissions and
`tap`.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from millrace.contracts.ingress import SequencesReturned, TokensGenerated, TokensResent
from millrace.contracts.kv import (
    EndLease,
    FreezeSequence,
    KvLeased,
    KvPulled,
    KvRefused,
    KvReserved,
    LeaseEnded,
    LeaseKv,
    PullKv,
    ReserveKv,
    SequenceFrozen,
    UnreserveKv,
)
from millrace.contracts.message import Body, ErrorReply
from millrace.contracts.migration import (
    AbortMigration,
    AllotEpoch,
    BlocksPulled,
    CommitMigration,
    EpochAllotted,
    EpochRefused,
    EvacuateInstance,
    InstanceEvacuated,
    MigrateSequence,
    MigrationCommitted,
    MigrationFinished,
    MigrationPrepared,
    MigrationRefused,
    PrepareMigration,
    PullBlocks,
    SequenceMoved,
)
from millrace.contracts.observers import DecisionMade, ProvisioningDecided, RequestFinished
from millrace.contracts.plan import Lease, Plan
from millrace.contracts.predictor import LatencyPrediction, NoPrediction, PredictLatency
from millrace.contracts.provisioner import (
    InstanceStarting,
    InstanceStopping,
    ProvisionRefused,
    StartInstance,
    StopInstance,
)
from millrace.contracts.status import InstanceRecord, InstanceSummary, ServicePresence, StatusSnapshot
from millrace.contracts.tagger import LengthTag, TagRequest
from millrace.contracts.worker import (
    AcknowledgeSequences,
    CancelSequence,
    DrainWorker,
    ResendTokens,
    SequenceAccepted,
    SequenceRefused,
    SubmitSequence,
    TokensForgotten,
)

WIRE_TYPES: tuple[type[Body], ...] = (
    AbortMigration,
    AcknowledgeSequences,
    AllotEpoch,
    BlocksPulled,
    CancelSequence,
    CommitMigration,
    DecisionMade,
    DrainWorker,
    EndLease,
    EpochAllotted,
    EpochRefused,
    ErrorReply,
    EvacuateInstance,
    FreezeSequence,
    InstanceEvacuated,
    InstanceRecord,
    InstanceStarting,
    InstanceStopping,
    InstanceSummary,
    KvLeased,
    KvPulled,
    KvRefused,
    KvReserved,
    LatencyPrediction,
    Lease,
    LeaseEnded,
    LeaseKv,
    LengthTag,
    MigrateSequence,
    MigrationCommitted,
    MigrationFinished,
    MigrationPrepared,
    MigrationRefused,
    NoPrediction,
    Plan,
    PredictLatency,
    PrepareMigration,
    ProvisionRefused,
    ProvisioningDecided,
    PullBlocks,
    PullKv,
    RequestFinished,
    ResendTokens,
    ReserveKv,
    SequenceAccepted,
    SequenceFrozen,
    SequenceMoved,
    SequenceRefused,
    SequencesReturned,
    ServicePresence,
    StartInstance,
    StatusSnapshot,
    StopInstance,
    SubmitSequence,
    TagRequest,
    TokensForgotten,
    TokensGenerated,
    TokensResent,
    UnreserveKv,
)


class Role(StrEnum):
    """Who speaks on the bus; each has a NATS user with its own permissions."""

    INGRESS = "ingress"
    TAGGER = "tagger"
    PREDICTOR = "predictor"
    COORDINATOR = "coordinator"
    WORKER = "worker"
    MIGRATOR = "migrator"
    SUPERVISOR = "supervisor"
    OPERATOR = "operator"  # a person at the command line: reads everything, asks for migrations and drains
    OBSERVER = "observer"  # tap, status, top: reads everything, writes nothing


class Pattern(StrEnum):
    """How a subject is used."""

    PUBLISH = "publish"
    REQUEST = "request"
    QUEUE_REQUEST = "queue_request"
    GATHER = "gather"


class Channel(msgspec.Struct, frozen=True, kw_only=True):
    """One subject with its use.

    Attributes:
        name: Key in the AsyncAPI document.
        subject: After the prefix; ``{parameter}`` stands for one subject token.
        messages: Types sent there.
        replies: Types answered, empty for publish.
    """

    name: str
    subject: str
    pattern: Pattern
    messages: tuple[type[Body], ...]
    senders: tuple[Role, ...]
    receivers: tuple[Role, ...]
    replies: tuple[type[Body], ...] = ()
    queue_group: str = ""
    summary: str = ""


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """One JetStream KV bucket.

    Attributes:
        ttl_s: Age after which a key is dropped, seconds; 0 for never.
    """

    name: str
    key: str
    value: type[Body]
    writers: tuple[Role, ...]
    ttl_s: float = 0.0
    summary: str = ""


CHANNELS: tuple[Channel, ...] = (
    Channel(
        name="tag",
        subject="tag.{model}",
        pattern=Pattern.QUEUE_REQUEST,
        messages=(TagRequest,),
        replies=(LengthTag, ErrorReply),
        queue_group="tagger",
        senders=(Role.INGRESS,),
        receivers=(Role.TAGGER,),
        summary="Expected output length of a request.",
    ),
    Channel(
        name="predict",
        subject="predict.{model}.{instance}",
        pattern=Pattern.QUEUE_REQUEST,
        messages=(PredictLatency,),
        replies=(LatencyPrediction, NoPrediction, ErrorReply),
        queue_group="predictor",
        senders=(Role.INGRESS,),
        receivers=(Role.PREDICTOR,),
        summary="What would happen if that instance took this request? Asked of several instances at once.",
    ),
    Channel(
        name="submit",
        subject="engine.{instance}.submit",
        pattern=Pattern.REQUEST,
        messages=(SubmitSequence,),
        replies=(SequenceAccepted, SequenceRefused, ErrorReply),
        senders=(Role.INGRESS, Role.MIGRATOR),
        receivers=(Role.WORKER,),
        summary="Hand a sequence to an instance.",
    ),
    Channel(
        name="cancel",
        subject="engine.{instance}.cancel",
        pattern=Pattern.PUBLISH,
        messages=(CancelSequence,),
        senders=(Role.INGRESS,),
        receivers=(Role.WORKER,),
        summary="Stop a sequence and free its blocks.",
    ),
    Channel(
        name="resend",
        subject="engine.{instance}.resend",
        pattern=Pattern.REQUEST,
        messages=(ResendTokens,),
        replies=(TokensResent, TokensForgotten, ErrorReply),
        senders=(Role.INGRESS,),
        receivers=(Role.WORKER,),
        summary="Ask again for tokens after a gap.",
    ),
    Channel(
        name="acknowledge",
        subject="engine.{instance}.acknowledge",
        pattern=Pattern.PUBLISH,
        messages=(AcknowledgeSequences,),
        senders=(Role.INGRESS,),
        receivers=(Role.WORKER,),
        summary="Finished sequences that ingress has whole.",
    ),
    Channel(
        name="drain",
        subject="engine.{instance}.drain",
        pattern=Pattern.PUBLISH,
        messages=(DrainWorker,),
        senders=(Role.COORDINATOR, Role.SUPERVISOR, Role.OPERATOR),
        receivers=(Role.WORKER,),
        summary="Take no new work, finish or hand back what runs.",
    ),
    Channel(
        name="tokens",
        subject="tokens.{ingress}",
        pattern=Pattern.PUBLISH,
        messages=(TokensGenerated,),
        senders=(Role.WORKER,),
        receivers=(Role.INGRESS,),
        summary="All tokens of one engine step for one ingress.",
    ),
    Channel(
        name="returned",
        subject="returned.{ingress}",
        pattern=Pattern.PUBLISH,
        messages=(SequencesReturned,),
        senders=(Role.WORKER,),
        receivers=(Role.INGRESS,),
        summary="Sequences that a worker hands back for continuation elsewhere.",
    ),
    Channel(
        name="status",
        subject="status.{model}.{instance}",
        pattern=Pattern.PUBLISH,
        messages=(StatusSnapshot,),
        senders=(Role.WORKER,),
        receivers=(Role.COORDINATOR, Role.PREDICTOR, Role.MIGRATOR),
        summary="Full snapshot, at most one per engine step, at least every 250 ms.",
    ),
    Channel(
        name="summary",
        subject="summary.{model}.{instance}",
        pattern=Pattern.PUBLISH,
        messages=(InstanceSummary,),
        senders=(Role.WORKER,),
        receivers=(Role.INGRESS, Role.COORDINATOR, Role.PREDICTOR, Role.MIGRATOR),
        summary="Small snapshot and heartbeat, between every 25 ms and every 250 ms.",
    ),
    Channel(
        name="presence",
        subject="presence.{role}.{name}",
        pattern=Pattern.PUBLISH,
        messages=(ServicePresence,),
        senders=(
            Role.INGRESS,
            Role.TAGGER,
            Role.PREDICTOR,
            Role.COORDINATOR,
            Role.WORKER,
            Role.MIGRATOR,
            Role.SUPERVISOR,
        ),
        receivers=(Role.INGRESS, Role.WORKER, Role.COORDINATOR, Role.PREDICTOR, Role.MIGRATOR),
        summary="Heartbeat of a service, every second; DEAD from the supervisor.",
    ),
    Channel(
        name="decision",
        subject="decision.{model}",
        pattern=Pattern.PUBLISH,
        messages=(DecisionMade,),
        senders=(Role.INGRESS, Role.COORDINATOR),
        receivers=(Role.OBSERVER, Role.PREDICTOR, Role.COORDINATOR),
        summary="What was decided, why, with the scores.",
    ),
    Channel(
        name="outcome",
        subject="outcome.{model}",
        pattern=Pattern.PUBLISH,
        messages=(RequestFinished,),
        senders=(Role.INGRESS,),
        receivers=(Role.TAGGER, Role.PREDICTOR, Role.COORDINATOR),
        summary="What became of a request.",
    ),
    Channel(
        name="provisioning",
        subject="provisioning.{model}",
        pattern=Pattern.PUBLISH,
        messages=(ProvisioningDecided,),
        senders=(Role.COORDINATOR,),
        receivers=(Role.OBSERVER,),
        summary="More instances, or fewer, and why.",
    ),
    Channel(
        name="provision_start",
        subject="provision.{host}.start",
        pattern=Pattern.REQUEST,
        messages=(StartInstance,),
        replies=(InstanceStarting, ProvisionRefused, ErrorReply),
        senders=(Role.COORDINATOR,),
        receivers=(Role.SUPERVISOR,),
        summary="Start one more instance on that host.",
    ),
    Channel(
        name="provision_stop",
        subject="provision.{host}.stop",
        pattern=Pattern.REQUEST,
        messages=(StopInstance,),
        replies=(InstanceStopping, ProvisionRefused, ErrorReply),
        senders=(Role.COORDINATOR,),
        receivers=(Role.SUPERVISOR,),
        summary="Drain an instance of that host and end it.",
    ),
    Channel(
        name="lease",
        subject="engine.{instance}.lease",
        pattern=Pattern.REQUEST,
        messages=(LeaseKv,),
        replies=(
            KvLeased,
            KvRefused,
            ErrorReply,
        ),
        senders=(Role.MIGRATOR,),
        receivers=(Role.WORKER,),
        summary="Pin a running sequence's full blocks for a time.",
    ),
    Channel(
        name="freeze",
        subject="engine.{instance}.freeze",
        pattern=Pattern.REQUEST,
        messages=(FreezeSequence,),
        replies=(
            SequenceFrozen,
            KvRefused,
            ErrorReply,
        ),
        senders=(Role.MIGRATOR,),
        receivers=(Role.WORKER,),
        summary="Stop a leased sequence for its last blocks to be read.",
    ),
    Channel(
        name="end_lease",
        subject="engine.{instance}.end",
        pattern=Pattern.REQUEST,
        messages=(EndLease,),
        replies=(
            LeaseEnded,
            ErrorReply,
        ),
        senders=(Role.MIGRATOR,),
        receivers=(Role.WORKER,),
        summary="Let a leased sequence go, or go on.",
    ),
    Channel(
        name="reserve",
        subject="engine.{instance}.reserve",
        pattern=Pattern.REQUEST,
        messages=(ReserveKv,),
        replies=(
            KvReserved,
            KvRefused,
            ErrorReply,
        ),
        senders=(Role.MIGRATOR,),
        receivers=(Role.WORKER,),
        summary="Take idle blocks for a sequence to come.",
    ),
    Channel(
        name="pull",
        subject="engine.{instance}.pull",
        pattern=Pattern.REQUEST,
        messages=(PullKv,),
        replies=(
            KvPulled,
            KvRefused,
            ErrorReply,
        ),
        senders=(Role.MIGRATOR,),
        receivers=(Role.WORKER,),
        summary="Read full blocks from another instance.",
    ),
    Channel(
        name="unreserve",
        subject="engine.{instance}.unreserve",
        pattern=Pattern.PUBLISH,
        messages=(UnreserveKv,),
        senders=(Role.MIGRATOR,),
        receivers=(Role.WORKER,),
        summary="Free blocks whose sequence did not come.",
    ),
    Channel(
        name="epoch",
        subject="epoch.{ingress}",
        pattern=Pattern.REQUEST,
        messages=(AllotEpoch,),
        replies=(
            EpochAllotted,
            EpochRefused,
            ErrorReply,
        ),
        senders=(Role.MIGRATOR,),
        receivers=(Role.INGRESS,),
        summary="The epoch that a target shall decode in.",
    ),
    Channel(
        name="moved",
        subject="moved.{ingress}",
        pattern=Pattern.PUBLISH,
        messages=(SequenceMoved,),
        senders=(Role.WORKER,),
        receivers=(Role.INGRESS,),
        summary="A target owns a sequence now.",
    ),
    Channel(
        name="migrate_start",
        subject="migrate.{instance}.start",
        pattern=Pattern.REQUEST,
        messages=(MigrateSequence,),
        replies=(
            MigrationFinished,
            ErrorReply,
        ),
        senders=(
            Role.OPERATOR,
            Role.COORDINATOR,
            Role.MIGRATOR,
        ),
        receivers=(Role.MIGRATOR,),
        summary="Move a sequence away from this instance.",
    ),
    Channel(
        name="migrate_evacuate",
        subject="migrate.{instance}.evacuate",
        pattern=Pattern.REQUEST,
        messages=(EvacuateInstance,),
        replies=(
            InstanceEvacuated,
            ErrorReply,
        ),
        senders=(
            Role.WORKER,
            Role.OPERATOR,
            Role.COORDINATOR,
        ),
        receivers=(Role.MIGRATOR,),
        summary="Move everything away from this instance.",
    ),
    Channel(
        name="migrate_prepare",
        subject="migrate.{instance}.prepare",
        pattern=Pattern.REQUEST,
        messages=(PrepareMigration,),
        replies=(
            MigrationPrepared,
            MigrationRefused,
            ErrorReply,
        ),
        senders=(Role.MIGRATOR,),
        receivers=(Role.MIGRATOR,),
        summary="Make room at the target.",
    ),
    Channel(
        name="migrate_pull",
        subject="migrate.{instance}.pull",
        pattern=Pattern.REQUEST,
        messages=(PullBlocks,),
        replies=(
            BlocksPulled,
            MigrationRefused,
            ErrorReply,
        ),
        senders=(Role.MIGRATOR,),
        receivers=(Role.MIGRATOR,),
        summary="One round of full blocks while the source decodes on.",
    ),
    Channel(
        name="migrate_commit",
        subject="migrate.{instance}.commit",
        pattern=Pattern.REQUEST,
        messages=(CommitMigration,),
        replies=(
            MigrationCommitted,
            MigrationRefused,
            ErrorReply,
        ),
        senders=(Role.MIGRATOR,),
        receivers=(Role.MIGRATOR,),
        summary="The source stands still: read the tail and decode on.",
    ),
    Channel(
        name="migrate_abort",
        subject="migrate.{instance}.abort",
        pattern=Pattern.PUBLISH,
        messages=(AbortMigration,),
        senders=(Role.MIGRATOR,),
        receivers=(Role.MIGRATOR,),
        summary="The source gives up.",
    ),
    Channel(
        name="migration",
        subject="migration.{model}",
        pattern=Pattern.PUBLISH,
        messages=(MigrationFinished,),
        senders=(Role.MIGRATOR,),
        receivers=(
            Role.OBSERVER,
            Role.COORDINATOR,
        ),
        summary="What became of a migration.",
    ),
)

BUCKETS: tuple[Bucket, ...] = (
    Bucket(name="plan", key="{model}", value=Plan, writers=(Role.COORDINATOR,), summary="Stages and their instances."),
    Bucket(
        name="instance",
        key="{instance}",
        value=InstanceRecord,
        writers=(Role.WORKER,),
        ttl_s=10.0,
        summary="Registered instances; re-put every 3 s.",
    ),
    Bucket(
        name="lease",
        key="{model}",
        value=Lease,
        writers=(Role.COORDINATOR,),
        summary="The active coordinator of a model.",
    ),
)
