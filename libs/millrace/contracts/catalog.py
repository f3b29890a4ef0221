"""Every wire type and every subject, once: the source of the codec, the AsyncAPI document, NATS permissions and
`tap`.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from millrace.contracts.ingress import SequencesReturned, TokensGenerated, TokensResent
from millrace.contracts.message import Body, ErrorReply
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
    AcknowledgeSequences,
    CancelSequence,
    DecisionMade,
    DrainWorker,
    ErrorReply,
    InstanceRecord,
    InstanceStarting,
    InstanceStopping,
    InstanceSummary,
    LatencyPrediction,
    Lease,
    LengthTag,
    NoPrediction,
    Plan,
    PredictLatency,
    ProvisionRefused,
    ProvisioningDecided,
    RequestFinished,
    ResendTokens,
    SequenceAccepted,
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
)


class Role(StrEnum):
    """Who speaks on the bus; each has a NATS user with its own permissions."""

    INGRESS = "ingress"
    TAGGER = "tagger"
    PREDICTOR = "predictor"
    COORDINATOR = "coordinator"
    WORKER = "worker"
    SUPERVISOR = "supervisor"
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
        senders=(Role.INGRESS,),
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
        senders=(Role.COORDINATOR, Role.SUPERVISOR),
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
        receivers=(Role.COORDINATOR, Role.PREDICTOR),
        summary="Full snapshot, at most one per engine step, at least every 250 ms.",
    ),
    Channel(
        name="summary",
        subject="summary.{model}.{instance}",
        pattern=Pattern.PUBLISH,
        messages=(InstanceSummary,),
        senders=(Role.WORKER,),
        receivers=(Role.INGRESS, Role.COORDINATOR, Role.PREDICTOR),
        summary="Small snapshot and heartbeat, between every 25 ms and every 250 ms.",
    ),
    Channel(
        name="presence",
        subject="presence.{role}.{name}",
        pattern=Pattern.PUBLISH,
        messages=(ServicePresence,),
        senders=(Role.INGRESS, Role.TAGGER, Role.PREDICTOR, Role.COORDINATOR, Role.WORKER, Role.SUPERVISOR),
        receivers=(Role.INGRESS, Role.WORKER, Role.COORDINATOR, Role.PREDICTOR),
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
