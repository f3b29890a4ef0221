"""Messages and effects between the HTTP adapter and the core: calls in, deltas out.

A *call* is one HTTP request for a completion, validated and tokenized by the adapter. Exactly one of RefuseCall,
CompleteCall or FailCall ends it (or nothing, after CallAbandoned). DeliverDeltas come only between acceptance and the
end.

A call of a cascade has ``members``: the call of each of its models. AcceptCall then says who
answers, and the last DeliverDeltas and CompleteCall carry a CascadeReport.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
from millrace.actor.effects import Effect
from millrace.contracts.message import Body
from millrace.contracts.observers import CascadeAttempt
from millrace.contracts.worker import Sampling

Tier = Annotated[int, msgspec.Meta(ge=0, le=63)]


class CallKind(StrEnum):
    """Endpoint of a call."""

    CHAT = "chat"
    COMPLETION = "completion"


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of an API key; 0 for none."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrency: int = 0


class CascadeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Wishes of a client for a call of a cascade: the field ``cascade`` of a request. docs/CASCADE.md explains them.

    Attributes:
        quality: Least score at which an answer is delivered, 0 to 100, in place of the plan's thresholds; None for the
            plan's.
        max_tier: Position of the last tier that may be asked, from 0; None for the plan's last.
        entry_tier: Position of the first tier; None leaves it to the entry policy.
        stream: With ``early_commit`` an answer streams as soon as its first tokens are good enough.
    """

    quality: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    max_tier: Tier | None = None
    entry_tier: Tier | None = None
    stream: Literal["buffer", "early_commit"] | None = None

    @property
    def early_commit(self) -> bool:
        return self.stream == "early_commit"


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request.

    Attributes:
        request: Id, unique over all ingresses.
        prompts: Token ids, one list per prompt; choice ``p * n + c`` is prompt p's choice c and sequence
            ``<request>.<p * n + c>``.
        prompt_head: First 2,048 characters of the rendered prompt, for the tagger.
        sampling: Sampling of choice 0; choice c of each prompt gets ``seed + c`` where a seed is set (as vLLM does).
        stop: Stop strings, applied in the core; at most 4.
        include_stop: Keep the stop string in the text.
        key: Name of the API key; empty where none is asked for.
        stream: Whether the adapter wants deltas as they come. Without it the core delivers the same deltas; they
            may be fewer and larger.
        timeout_ns: Time from arrival until the call fails with a clear error; 0 for the configured default.
        traceparent: Context of the call's root span, sampled flag included; made by the adapter or taken from the
            client's.
        parent_span_id: The client's own span id; empty for none.
        constraint_param: Request field that constrains the output (``response_format``, ``structured_outputs`` or
            ``tools``); empty for none.
        judged: Ingress needs the log-probability of each token, whether or not the client asked for any.
        members: Of a cascade's call: the call of each model that can take it, in the order of its tiers, with the
            model's own prompts and bound of output tokens. All else of the cascade's call is as in the first one.
        judged_prompt: Of a member: the rendered prompt for judges; its last 64 KiB where it is longer, empty for
            several prompts.
        cascade: What the client wants of the cascade.
        client_id: The client's own request id; empty where it sent none.
        parent: Request id of the cascade's call that this is an attempt of; empty for a client's own call.
        tell_tokens: Deltas have their token ids.
        tokens_as_ids: Log-probabilities name a token as ``token_id:<id>``.
        begun: Output tokens of its one choice that another ingress was given before it was lost. They are delivered
            once more, as the first delta.
        second_from: Of each prompt, as in Pooling; empty where no prompt is such a pair.
    """

    request: str
    kind: CallKind
    model: str
    prompts: list[list[int]]
    sampling: Sampling
    n: int = 1
    prompt_head: str = ""
    stop: list[str] = []
    include_stop: bool = False
    key: str = ""
    limits: KeyLimits = KeyLimits()
    stream: bool = False
    skip_special_tokens: bool = True
    timeout_ns: int = 0
    traceparent: str = ""
    parent_span_id: str = ""
    constraint_param: str = ""
    judged: bool = False
    members: list[Call] = []
    judged_prompt: str = ""
    cascade: CascadeOptions = CascadeOptions()
    client_id: str = ""
    parent: str = ""
    tell_tokens: bool = False
    tokens_as_ids: bool = False
    begun: list[int] = []
    second_from: list[int] = []

    @property
    def shown(self) -> str:
        """Name of the model that the client asked for."""
        return self.model if self.sampling.adapter is None else self.sampling.adapter.name


class CallSubmitted(Body, frozen=True, kw_only=True, tag="local.CallSubmitted/1"):
    """A new call."""

    call: Call


class CallAbandoned(Body, frozen=True, kw_only=True, tag="local.CallAbandoned/1"):
    """The client hung up, or was cut as a slow reader (``reason`` ``client_gone`` or ``slow_reader``)."""

    request: str
    reason: str


class DeltaLogprob(msgspec.Struct, frozen=True):
    """Log-probability of one token with its alternatives; tokens as text and as bytes.

    Attributes:
        logprob: None of a prompt's first token.
        top: Triples of (token text, logprob, token bytes), falling.
    """

    token: str
    logprob: float | None
    token_bytes: bytes
    top: list[tuple[str, float, bytes]]


class CallPart(msgspec.Struct, frozen=True):
    """New part of a tool call.

    Attributes:
        index: Position among the calls of its choice.
        name: Of the function, with the call's first part; empty in later ones.
        arguments: Further JSON text.
        id: Id in the model's own format, with the first part; empty where any will do.
    """

    index: int
    name: str = ""
    arguments: str = ""
    id: str = ""


class ChoiceDelta(msgspec.Struct, frozen=True):
    """New output of one choice. The core tells text; the parser of a call's output moves parts of it to ``reasoning``
    and ``calls``.

    Attributes:
        index: ``p * n + c``.
        text: Only complete characters; text that may be the start of a stop string is held back.
        tokens: Number of output tokens this delta covers.
        finish_reason: ``stop``, ``length`` or ``""`` while it goes on.
        stop_reason: The stop string or token id that ended it.
        token_ids: Of the text, where the call wants them told.
        prompt_logprobs: With a choice's first delta, where asked for: for each token of the prompt but the first, which
            has None, its id and those of the likeliest ones with ``logprob``, ``rank`` and ``decoded_token``.
        pooled: Of a call that is pooled: ``worker.Pooled``, encoded.
    """

    index: int
    text: str
    tokens: int
    finish_reason: str = ""
    stop_reason: str | int | None = None
    logprobs: list[DeltaLogprob] | None = None
    token_ids: list[int] | None = None
    reasoning: str = ""
    calls: list[CallPart] = []
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    pooled: bytes = b""


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a whole call: prompts counted once each, outputs over all choices, stop tokens included as
    vLLM counts them.

    Attributes:
        reasoning_tokens: Of the outputs; None where the model's output has no reasoning to parse.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int | None = None


class CascadeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Course of a cascade's call.

    Attributes:
        tier, model, score: Of the delivered answer.
        usages: Of the attempts.
    """

    name: str
    tier: int
    model: str
    score: float | None
    reason: str
    attempts: list[CascadeAttempt]
    usages: list[Usage]


class AcceptCall(Effect, frozen=True, kw_only=True):
    """Every sequence of the call was accepted by an instance: the adapter may send headers and the role delta.

    Attributes:
        answering: Of a cascade's call, which is accepted when it is known who answers; no score where the answer is
            incomplete or was not judged.
    """

    request: str
    answering: CascadeAttempt | None = None


class DeliverDeltas(Effect, frozen=True, kw_only=True):
    """New text for one call.

    Attributes:
        usage: Counts so far (for ``continuous_usage_stats``).
        report: With the last delivery of a cascade's call.
    """

    request: str
    deltas: list[ChoiceDelta]
    usage: Usage
    report: CascadeReport | None = None


class CompleteCall(Effect, frozen=True, kw_only=True):
    """Every choice ended."""

    request: str
    usage: Usage
    report: CascadeReport | None = None


class RefusalKind(StrEnum):
    """Reason of a refused or failed call; the adapter maps each to status, OpenAI error type and code."""

    RATE_LIMITED = "rate_limited"  # 429, with retry_after_s
    CONCURRENCY = "concurrency"  # 429
    QUEUE_FULL = "queue_full"  # 503, with retry_after_s
    NO_INSTANCE = "no_instance"  # 503: the model is known but nothing serves it now
    UNKNOWN_MODEL = "unknown_model"  # 404
    TOO_LONG = "too_long"  # 400, param messages / prompt
    INVALID = "invalid"  # 400: the engine refuses the parameters
    AT_FAULT = "at_fault"  # 400: engines fail on this request again and again
    TIMEOUT = "timeout"  # 504: not done within its deadline
    CONTINUATION_FAILED = "continuation_failed"  # 503 or, mid-stream, an error event
    STOPPING = "stopping"  # 503: this ingress is going down


class RefuseCall(Effect, frozen=True, kw_only=True):
    """The call was not accepted; nothing of it reached, or is left at, a worker."""

    request: str
    kind: RefusalKind
    detail: str
    param: str = ""
    retry_after_s: float = 0.0


class FailCall(Effect, frozen=True, kw_only=True):
    """An accepted call cannot be finished. In a stream the adapter sends an error event and ends it."""

    request: str
    kind: RefusalKind
    detail: str
    param: str = ""
