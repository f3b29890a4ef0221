"""Every wire type and every subject, once: the source of the codec, the AsyncAPI document, NATS permissions and
`tap`.
"""

from __future__ import annotations

from millrace.contracts.cascade import CascadePlan
from millrace.contracts.catalog_broker import BROKER_CHANNELS
from millrace.contracts.catalog_migration import MIGRATION_CHANNELS
from millrace.contracts.channels import Bucket, Channel, Pattern, Role
from millrace.contracts.coordinator import OrderAccepted, OrderRefused, PlanProposed, SetInstances, SetRole
from millrace.contracts.ingress import (
    FindRequests,
    RequestsFound,
    SequencesReturned,
    TokensGenerated,
    TokensResent,
)
from millrace.contracts.judge import AnswerJudged, JudgeAnswer
from millrace.contracts.message import Body, ErrorReply
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

CHANNELS: tuple[Channel, ...] = (
    Channel(
        name="tag",
        subject="tag.{model}",
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
        messages=(PredictLatency,),
        replies=(LatencyPrediction, NoPrediction, ErrorReply),
        queue_group="predictor",
        senders=(Role.INGRESS,),
        receivers=(Role.PREDICTOR,),
        summary="What would happen if that instance took this request? Asked of several instances at once.",
    ),
    Channel(
        name="judge",
        subject="judge.{cascade}",
        messages=(JudgeAnswer,),
        replies=(AnswerJudged, ErrorReply),
        queue_group="judge",
        senders=(Role.INGRESS,),
        receivers=(Role.JUDGE,),
        summary="How likely is that answer right?",
    ),
    Channel(
        name="submit",
        subject="engine.{instance}.submit",
        messages=(SubmitSequence,),
        replies=(SequenceAccepted, SequenceRefused, ErrorReply),
        senders=(Role.INGRESS, Role.MIGRATOR),
        receivers=(Role.WORKER,),
        summary="Hand a sequence to an instance.",
    ),
    Channel(
        name="cancel",
        subject="engine.{instance}.cancel",
        messages=(CancelSequence,),
        senders=(Role.INGRESS,),
        receivers=(Role.WORKER,),
        summary="Stop a sequence and free its blocks.",
    ),
    Channel(
        name="resend",
        subject="engine.{instance}.resend",
        messages=(ResendTokens,),
        replies=(TokensResent, ErrorReply),
        senders=(Role.INGRESS,),
        receivers=(Role.WORKER,),
        summary="Ask again for tokens after a gap.",
    ),
    Channel(
        name="acknowledge",
        subject="engine.{instance}.acknowledge",
        messages=(AcknowledgeSequences,),
        senders=(Role.INGRESS,),
        receivers=(Role.WORKER,),
        summary="Finished sequences that ingress has whole.",
    ),
    Channel(
        name="adapter",
        subject="engine.{instance}.adapter",
        messages=(ChangeAdapter,),
        replies=(AdapterChanged, ErrorReply),
        senders=(Role.INGRESS,),
        receivers=(Role.WORKER,),
        summary="Load a LoRA adapter, or offer it no longer.",
    ),
    Channel(
        name="drain",
        subject="engine.{instance}.drain",
        messages=(DrainWorker,),
        senders=(Role.COORDINATOR, Role.SUPERVISOR, Role.OPERATOR),
        receivers=(Role.WORKER,),
        summary="Take no new work, finish or hand back what runs.",
    ),
    Channel(
        name="budget",
        subject="engine.{instance}.budget",
        messages=(SetStepBudget,),
        senders=(Role.COORDINATOR,),
        receivers=(Role.WORKER,),
        summary="Compute at most so many tokens a step for a while.",
    ),
    Channel(
        name="return",
        subject="engine.{instance}.return",
        messages=(ReturnSequences,),
        senders=(Role.BROKER,),
        receivers=(Role.WORKER,),
        summary="Hand queued sequences back to their ingresses.",
    ),
    Channel(
        name="tokens",
        subject="tokens.{ingress}",
        messages=(TokensGenerated,),
        senders=(Role.WORKER,),
        receivers=(Role.INGRESS,),
        summary="All tokens of one engine step for one ingress.",
    ),
    Channel(
        name="returned",
        subject="returned.{ingress}",
        messages=(SequencesReturned,),
        senders=(Role.WORKER,),
        receivers=(Role.INGRESS,),
        summary="Sequences that a worker hands back for continuation elsewhere.",
    ),
    Channel(
        name="find",
        subject="find",
        gathers=True,
        messages=(FindRequests,),
        replies=(RequestsFound,),
        senders=(Role.OPERATOR,),
        receivers=(Role.INGRESS,),
        summary="Open requests of a client's own request id.",
    ),
    Channel(
        name="status",
        subject="status.{model}.{instance}",
        messages=(StatusSnapshot,),
        senders=(Role.WORKER,),
        receivers=(Role.COORDINATOR, Role.PREDICTOR, Role.MIGRATOR, Role.BROKER),
        summary="Full snapshot, at most one per engine step, at least every 250 ms.",
    ),
    Channel(
        name="summary",
        subject="summary.{model}.{instance}",
        messages=(InstanceSummary,),
        senders=(Role.WORKER,),
        receivers=(Role.INGRESS, Role.COORDINATOR, Role.PREDICTOR, Role.MIGRATOR, Role.BROKER),
        summary="Small snapshot and heartbeat, between every 25 ms and every 250 ms.",
    ),
    Channel(
        name="presence",
        subject="presence.{role}.{name}",
        messages=(ServicePresence,),
        senders=tuple(role for role in Role if role not in (Role.OPERATOR, Role.OBSERVER)),
        receivers=(Role.INGRESS, Role.WORKER, Role.COORDINATOR, Role.PREDICTOR, Role.MIGRATOR, Role.BROKER),
        summary="Heartbeat of a service, every second; DEAD from the supervisor.",
    ),
    Channel(
        name="decision",
        subject="decision.{model}",
        messages=(DecisionMade,),
        senders=(Role.INGRESS, Role.COORDINATOR),
        receivers=(Role.OBSERVER, Role.PREDICTOR, Role.COORDINATOR),
        summary="What was decided, why, with the scores.",
    ),
    Channel(
        name="outcome",
        subject="outcome.{model}",
        messages=(RequestFinished,),
        senders=(Role.INGRESS,),
        receivers=(Role.TAGGER, Role.PREDICTOR, Role.COORDINATOR),
        summary="What became of a request.",
    ),
    Channel(
        name="provisioning",
        subject="provisioning.{model}",
        messages=(ProvisioningDecided,),
        senders=(Role.COORDINATOR,),
        receivers=(Role.OBSERVER,),
        summary="More instances, or fewer, and why.",
    ),
    Channel(
        name="provision_start",
        subject="provision.{host}.start",
        messages=(StartInstance,),
        replies=(InstanceOrdered, OrderRefused, ErrorReply),
        senders=(Role.COORDINATOR, Role.OPERATOR),
        receivers=(Role.SUPERVISOR,),
        summary="Start one more instance on that host.",
    ),
    Channel(
        name="provision_stop",
        subject="provision.{host}.stop",
        messages=(StopInstance,),
        replies=(InstanceOrdered, OrderRefused, ErrorReply),
        senders=(Role.COORDINATOR, Role.OPERATOR),
        receivers=(Role.SUPERVISOR,),
        summary="Drain an instance of that host and end it.",
    ),
    Channel(
        name="provision_update",
        subject="provision.{host}.update",
        messages=(UpdateCluster,),
        replies=(ClusterCompared, ErrorReply),
        senders=(Role.OPERATOR,),
        receivers=(Role.SUPERVISOR,),
        summary="Compare that host's processes with the cluster's file, and bring them in line.",
    ),
    Channel(
        name="coordinate_role",
        subject="coordinate.{model}.role",
        messages=(SetRole,),
        replies=(OrderAccepted, OrderRefused, ErrorReply),
        senders=(Role.OPERATOR,),
        receivers=(Role.COORDINATOR,),
        summary="Give an instance another role; answered by the active coordinator of the model.",
    ),
    Channel(
        name="coordinate_scale",
        subject="coordinate.{model}.scale",
        messages=(SetInstances,),
        replies=(OrderAccepted, OrderRefused, ErrorReply),
        senders=(Role.OPERATOR,),
        receivers=(Role.COORDINATOR,),
        summary="Have so many instances of a model; answered by its active coordinator.",
    ),
    Channel(
        name="coordinate_propose",
        subject="coordinate.{model}.propose",
        messages=(PlanProposed,),
        senders=(Role.COORDINATOR,),
        receivers=(Role.COORDINATOR, Role.OBSERVER),
        summary="What a controller wants of a model's plan: stages, or roles.",
    ),
    *BROKER_CHANNELS,
    *MIGRATION_CHANNELS,
)

#: How long responses can be asked for, seconds.
RESPONSE_S = 86_400.0

BUCKETS: tuple[Bucket, ...] = (
    Bucket(
        name="plan",
        key="{model}",
        value=Plan,
        writers=(Role.COORDINATOR,),
        watchers=(Role.COORDINATOR, Role.INGRESS, Role.MIGRATOR, Role.BROKER, Role.OBSERVER),
        summary="Stages and their instances.",
    ),
    Bucket(
        name="instance",
        key="{instance}",
        value=InstanceRecord,
        writers=(Role.WORKER,),
        watchers=(Role.COORDINATOR, Role.INGRESS, Role.MIGRATOR, Role.BROKER, Role.PREDICTOR, Role.OBSERVER),
        ttl_s=10.0,
        summary="Registered instances; re-put every 3 s.",
    ),
    Bucket(
        name="cascade",
        key="{cascade}",
        value=CascadePlan,
        writers=(Role.COORDINATOR, Role.OPERATOR),
        watchers=(Role.COORDINATOR, Role.INGRESS, Role.JUDGE, Role.SUPERVISOR, Role.OBSERVER),
        summary="Tiers of a cascade, their models and thresholds.",
    ),
    Bucket(
        name="cascade_lease",
        key="{cascade}",
        value=Lease,
        writers=(Role.COORDINATOR,),
        watchers=(Role.COORDINATOR,),
        summary="The active planner of a cascade.",
    ),
    Bucket(
        name="lease",
        key="{model}",
        value=Lease,
        writers=(Role.COORDINATOR,),
        watchers=(Role.COORDINATOR,),
        summary="The active coordinator of a model.",
    ),
    Bucket(
        name="response",
        key="{response}",
        value=StoredResponse,
        writers=(Role.INGRESS,),
        watchers=(Role.INGRESS,),
        private=True,
        ttl_s=RESPONSE_S,
        bytes_max=128 << 20,
        summary="Responses that clients may ask for again.",
    ),
    Bucket(
        name="response_log",
        key="{response}.{n}",
        value=ResponseEvents,
        writers=(Role.INGRESS,),
        watchers=(Role.INGRESS,),
        private=True,
        ttl_s=RESPONSE_S,
        bytes_max=128 << 20,
        summary="Events of responses that are made in the background; under an ingress's name its sign of life.",
    ),
)

#: Every type that a channel or a bucket carries, by name.
WIRE_TYPES: tuple[type[Body], ...] = tuple(
    sorted(
        {
            *(kind for channel in CHANNELS for kind in (*channel.messages, *channel.replies)),
            *(bucket.value for bucket in BUCKETS),
        },
        key=lambda kind: kind.__name__,
    )
)
