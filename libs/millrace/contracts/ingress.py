"""Messages an ingress receives from workers."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from millrace.contracts.message import Body


class FinishReason(StrEnum):
    """Reason why a sequence ended in its engine."""

    STOP = "stop"  # EOS or a stop token id (the id is the chunk's last token)
    LENGTH = "length"  # max_tokens or the model's limit
    CANCELLED = "cancelled"  # by ingress, or as an orphan
    ERROR = "error"  # the engine gave up on this one; ingress continues it elsewhere


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of one output position.

    Attributes:
        token_ids: The chosen token first, then the top ones in falling order (the chosen one may stand there again).
        logprobs: Natural log-probabilities, same order.
        rank: Rank of the chosen token, 1 for the most probable.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class EngineTimes(msgspec.Struct, frozen=True, array_like=True):
    """Course of one sequence at the instance that ended it.

    Attributes:
        queued_ns: From its submission there to its first batch.
        prefill_ns: From there to its first token there.
        running_ns: From its first batch to its end.
        preemptions: How often it was preempted.
    """

    queued_ns: int
    prefill_ns: int
    running_ns: int
    preemptions: int


class TokenChunk(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one sequence from one engine step (or several, where the sender was behind).

    Attributes:
        sequence: Id.
        epoch: Ownership epoch.
        first_index: Index of the first token here among the sequence's output tokens, 0 at the very first of epoch 0.
        token_ids: The tokens, possibly none with a finish reason.
        finish: Set on the last chunk.
        logprobs: One entry per token where asked for, else None.
        cached_tokens: Prompt tokens found in the prefix cache; sent with the epoch's first chunk, else None.
        detail: A sentence with FinishReason.ERROR.
        prompt_logprobs: Of the prompt's tokens from the second on, where asked for, with the sequence's first chunk.
        times: With ``finish``, of one that was computed at all; else None.
        pooled: One piece of a pooled output (``worker.Pooled``, encoded) per token; None for a text.
    """

    sequence: str
    epoch: int
    first_index: int
    token_ids: list[int]
    finish: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int | None = None
    detail: str = ""
    prompt_logprobs: list[TokenLogprobs] | None = None
    times: EngineTimes | None = None
    pooled: list[bytes] | None = None


class TokensGenerated(Body, frozen=True, kw_only=True, tag="TokensGenerated/1"):
    """All tokens of one engine step for one ingress.

    Attributes:
        instance: Sending instance.
        incarnation: Start time of that worker process, unix ns.
        step: Engine step number.
    """

    instance: str
    incarnation: int
    step: int
    chunks: list[TokenChunk]


class TokensResent(Body, frozen=True, kw_only=True, tag="TokensResent/1"):
    """Answers ResendTokens with everything held from the index on. A chunk that begins later: the worker never had
    the tokens before it.
    """

    chunk: TokenChunk


class FindRequests(Body, frozen=True, kw_only=True, tag="FindRequests/1"):
    """Asks every ingress for the open requests of a client's own request id. Only an ingress that has some answers.

    Attributes:
        client_id: Value of the header ``x-request-id``.
    """

    client_id: str


class RequestsFound(Body, frozen=True, kw_only=True, tag="RequestsFound/1"):
    """Answers FindRequests.

    Attributes:
        requests: Ids of the open requests; of a cascade those of its attempts.
    """

    ingress: str
    requests: list[str]


class ReturnReason(StrEnum):
    """Reason why a worker hands sequences back."""

    DRAINING = "draining"
    ENGINE_DIED = "engine_died"
    REQUESTED = "requested"  # a broker wants them elsewhere; the instance goes on


class SequencesReturned(Body, frozen=True, kw_only=True, tag="SequencesReturned/1"):
    """The worker no longer owns these sequences; ingress continues them elsewhere in a higher epoch.

    Attributes:
        sequences: Pairs of (sequence, epoch).
    """

    instance: str
    incarnation: int
    reason: ReturnReason
    sequences: list[tuple[str, int]]
