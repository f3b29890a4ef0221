"""The state of one ingress: open calls, their sequences with token logs, and what is asked of others just now."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from random import Random
from typing import Any

from millrace.contracts.observers import Forecast
from millrace.contracts.sequences import SequenceId
from millrace.contracts.subjects import Subjects
from millrace.contracts.worker import Sampling
from millrace.policies.dispatch import DISPATCH_POLICIES, DispatchPolicy
from millrace.telemetry.tracecontext import parse_traceparent

from services.ingress.calls.limits import AdmissionLimits
from services.ingress.calls.messages import Call, ChoiceDelta, DeltaLogprob
from services.ingress.cluster.cluster_view import IngressClusterView
from services.ingress.cluster.instances import KnownInstance
from services.ingress.config import IngressConfig, policy_parameters
from services.ingress.dispatch.prefix_blocks import PrefixHolders, PromptBlocks
from services.ingress.metrics import IngressMetrics
from services.ingress.pending import Pending, PredictorsHealth
from services.ingress.times import Times
from services.ingress.tokens.detokenizer import TextModel, TextStream


class SequencePhase(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"  # ingress owns it: no instance has it, it is to be placed
    ASKING = "asking"  # the same, and predictors are asked about it
    SUBMITTED = "submitted"  # asked of an instance in the current epoch, not answered yet
    RUNNING = "running"  # owned by its instance in the current epoch
    PROVING = "proving"  # its instance is lost; the target of a migration is asked whether it has it
    ENDED = "ended"


class EpochGrant:
    """An epoch that a migration's target may decode in, until it is proven that it does, or the allotment is void.

    Attributes:
        instance, incarnation: The target, when it was allotted.
        source: Who had the sequence then.
        tokens: So many, of the log then at least, are the target's as well: what it has is compared from here on.
        at_ns: When it was allotted.
        span: Context of the span of this move.
        proof: Correlation of the open question to the target; empty for none.
    """

    __slots__ = ("at_ns", "epoch", "incarnation", "instance", "migration", "proof", "source", "span", "tokens")

    def __init__(
        self, sequence: OpenSequence, target: KnownInstance, *, migration: str, epoch: int, now_ns: int, span: str
    ) -> None:
        assert sequence.instance is not None
        self.migration = migration
        self.epoch = epoch
        self.source = sequence.instance
        self.instance = target
        self.incarnation = target.incarnation
        self.tokens = len(sequence.log)
        self.at_ns = now_ns
        self.span = span
        self.proof = ""


class OpenSequence:
    """One choice of one prompt, from submission to its end.

    Attributes:
        log: All output tokens so far, over all epochs. Everything else of a continuation follows from it.
        owned: Whether an instance ever accepted it: what comes later is a continuation.
        last_ns: Last token, or last placement where none came since.
        epoch_max: Highest epoch that was ever submitted or allotted; the next one is above.
        allotment: The open one; a sequence has at most one, and only while an instance has it.
        voided: Migrations whose allotments were voided, the latest few: their late questions are refused.
        moved: It came to its instance by a migration in this epoch.
        fresh: No token came in this epoch.
        excluded: KnownInstance -> incarnation that failed it since it was last owned.
        waiting_since_ns: When it last lost its instance, or came; 0 while it is owned.
        rounds: Pauses since then.
        asking: Correlation of the open question to predictors; empty for none.
        blocks: Names of its prompt's blocks (prefixes.py); None until a predictor is to be asked.
        fruitless: Continuations in a row without a new token.
        resend: Correlation of the open ResendTokens; empty for none.
        lazy: The call neither streams nor has stop strings: its tokens become text once, at the end.
        pushed: Tokens of the log that became text.
        held_text, held_logprobs: For calls that do not stream: output that is delivered with the end.
    """

    __slots__ = (
        "allotment",
        "asking",
        "blocks",
        "call",
        "epoch",
        "epoch_max",
        "excluded",
        "finish_reason",
        "fresh",
        "fruitless",
        "held_logprobs",
        "held_text",
        "id",
        "incarnation",
        "index",
        "instance",
        "last_ns",
        "lazy",
        "log",
        "moved",
        "owned",
        "phase",
        "placed_ns",
        "probe_after_ns",
        "probed_ns",
        "prompt",
        "pushed",
        "resend",
        "resend_failures",
        "retry_at_ns",
        "rounds",
        "sampling",
        "span",
        "span_attributes",
        "span_start_ns",
        "stop_reason",
        "submit",
        "text",
        "tokens_max",
        "tries",
        "voided",
        "waiting_since_ns",
        "why",
    )

    def __init__(self, call: OpenCall, index: int, sampling: Sampling, text: TextStream, now_ns: int) -> None:
        self.call = call
        self.index = index
        self.id = str(SequenceId(call.request, index))
        self.prompt = call.call.prompts[index // call.call.n]
        self.sampling = sampling
        self.tokens_max = sampling.max_tokens
        self.text = text
        self.lazy = not call.call.stream and not call.call.stop  # detokenise once, at the end
        self.log: list[int] = []
        self.phase = SequencePhase.WAITING
        self.epoch = self.epoch_max = -1
        self.allotment: EpochGrant | None = None
        self.voided: tuple[str, ...] = ()
        self.moved = False
        self.instance: KnownInstance | None = None
        self.incarnation = 0  # of the instance, when it was asked
        self.placed_ns = 0
        self.owned = False
        self.fresh = True
        self.last_ns = now_ns
        self.probe_after_ns = 0
        self.probed_ns = 0
        self.resend = ""
        self.resend_failures = 0
        self.submit = ""
        self.asking = ""
        self.blocks: PromptBlocks | None = None
        self.excluded: dict[str, int] = {}
        self.tries = 0
        self.rounds = 0
        self.retry_at_ns = 0
        self.waiting_since_ns = now_ns
        self.fruitless = 0
        self.why = ""
        self.finish_reason = ""
        self.stop_reason: str | int | None = None
        self.pushed = 0
        self.held_text: list[str] = []
        self.held_logprobs: list[DeltaLogprob] = []
        self.span = ""
        self.span_start_ns = 0
        self.span_attributes: dict[str, Any] | None = None


class OpenCall:
    """One HTTP request, from submission to its one end.

    Attributes:
        unaccepted: Sequences that no instance has accepted yet; at 0 the call is accepted.
        unended: Sequences that have not ended; at 0 the call is complete.
        held: Deltas that came before the call was accepted.
        touched, settling: Deltas of the bus message in hand and what became of its chunks, where the call has several
            choices.
        trace: Context of the root span; None where the trace is not sampled.
        placed_ns: When the latest placement before acceptance was decided; predictions count from here.
        forecast: What was predicted of it for the chosen instance; None without a prediction, or where there are
            several prompts: no one forecast is of all.
    """

    __slots__ = (
        "accepted",
        "arrival_ns",
        "cached_tokens",
        "call",
        "continuations",
        "deadline_ns",
        "expected_output_tokens",
        "first_token_ns",
        "forecast",
        "held",
        "instances",
        "migrations",
        "output_tokens",
        "placed_ns",
        "policy",
        "predicted",
        "prompt_tokens",
        "request",
        "sequences",
        "settling",
        "several",
        "tagging",
        "touched",
        "trace",
        "unaccepted",
        "unended",
    )

    def __init__(self, call: Call, now_ns: int, timeout_ns: int) -> None:
        self.call = call
        self.request = call.request
        self.arrival_ns = now_ns
        self.deadline_ns = now_ns + timeout_ns
        self.sequences: list[OpenSequence] = []
        self.unaccepted = self.unended = len(call.prompts) * call.n
        self.several = self.unended > 1
        self.accepted = False
        self.tagging = ""
        self.predicted: float | None = None
        self.expected_output_tokens: int | None = None
        self.policy = ""
        self.prompt_tokens = sum(map(len, call.prompts))
        self.output_tokens = 0
        self.cached_tokens = 0
        self.first_token_ns = 0
        self.placed_ns = 0
        self.forecast: Forecast | None = None
        self.continuations = 0
        self.migrations = 0
        self.instances: list[str] = []
        self.held: list[ChoiceDelta] = []
        self.touched: list[ChoiceDelta] = []
        self.settling: list[Any] = []
        context = None if call.traceparent.endswith("0") else parse_traceparent(call.traceparent)
        self.trace = context if context is not None and context.sampled else None


class IngressState:
    """Everything one ingress knows, changed by the handlers of actor.py and the modules it calls."""

    def __init__(
        self,
        *,
        config: IngressConfig,
        incarnation: int,
        models: Mapping[str, TextModel],
        metrics: IngressMetrics,
        rng: Random,
        policy: DispatchPolicy,
    ) -> None:
        self.config = config
        self.name = config.name
        self.now_ns = 0  # of the message in hand
        self.incarnation = incarnation
        self.models = models
        self.metrics = metrics
        self.rng = rng
        self.subjects = Subjects(config.bus.cluster)
        self.cluster = IngressClusterView()
        self.admission = AdmissionLimits(config.limits)
        self.calls: dict[str, OpenCall] = {}
        self.deadline_ns = 0  # no open call's is earlier
        self.sequences: dict[str, OpenSequence] = {}
        self.owned: dict[str, dict[str, OpenSequence]] = {}  # instance -> its submitted and running sequences
        self.allotted: dict[str, dict[str, OpenSequence]] = {}  # target -> sequences with an open allotment there
        self.waiting: dict[str, OpenSequence] = {}
        self.pending: dict[str, Pending] = {}
        self.correlations = 0
        self.acknowledge: dict[str, list[tuple[str, int]]] = {}
        self.disowned: dict[tuple[str, str], int] = {}  # (stray, instance) -> unix ns until when that is not said again
        self.parameters = policy_parameters(config.dispatch, policy)
        self.policy = policy
        self.policy_states: dict[tuple[str, str], Any] = {}
        self.connected = True
        self.detectors_from_ns = 0
        self.outage_end_ns = 0
        self.tag_failures = 0
        self.tag_from_ns = 0
        self.tags_missing = False  # and said so
        self.predictors: dict[str, PredictorsHealth] = {}  # by model
        self.holders = PrefixHolders()
        self.stopping = False
        self.stop_at_ns = 0
        self.place_timer_ns = 0
        self.times = Times.of(config)

    def correlation(self, kind: str, pending: Pending) -> str:
        """A fresh correlation under which ``pending`` is found again."""
        self.correlations += 1
        name = f"{kind}.{self.correlations}"
        self.pending[name] = pending
        return name

    def detecting(self, now_ns: int) -> bool:
        """Whether silence means anything now: not while the bus is away, nor shortly after."""
        return self.connected and now_ns >= self.detectors_from_ns

    def policy_of(self, call: OpenCall) -> tuple[DispatchPolicy, Any]:
        """The call's policy with its parameters; those of its own choice have their defaults."""
        name = call.call.policy
        if not name or name == self.policy.name:
            return self.policy, self.parameters
        own = DISPATCH_POLICIES[name]
        return own, own.parameters()
