"""Messages a worker receives, and its direct answers.

A *request* is what a client sent. It is decoded as one or more *sequences*: one per prompt and choice (``n``). A
worker, its engine and all scheduling know sequences only. A sequence is owned by exactly one instance in each *epoch*;
the epoch rises whenever it moves (continuation after a failure, migration), and everything of an older epoch is void.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from millrace.contracts.ingress import TokenLogprobs
from millrace.contracts.kv import KvHandover
from millrace.contracts.message import Body


class StructuredOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A constraint on the output. Exactly one of the first six fields is set.

    Attributes:
        json_schema: JSON text of a schema.
        json_object: True for any JSON object.
        regex: A regular expression.
        choice: One of these strings.
        grammar: An EBNF grammar.
        structural_tag: JSON of xgrammar's structural tag: where which schema holds.
        after_reasoning: JSON of the chat template's values. It holds from the end of the reasoning on, which the
            engine's own parser finds by them; empty where it holds from the first token.
    """

    json_schema: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | None = None
    after_reasoning: str = ""


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter of a model.

    Attributes:
        name: Clients ask for it as a model.
        path: Folder in PEFT's format, where a worker finds it.
        fingerprint: Hash of its weights and its configuration.
    """

    name: str
    path: str
    fingerprint: str


class Images(msgspec.Struct, frozen=True, kw_only=True):
    """Images of a prompt. Its token ids have their places already, as many tokens for each as it takes.

    Attributes:
        data: Each image's file (PNG, JPEG, ...), in the prompt's order.
        prompt: The prompt's token ids with one placeholder for each, from which an engine makes the others again.
        digest: Hash of the files.
    """

    data: list[bytes]
    prompt: list[int]
    digest: str


class Pooling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Asks for what a model pools of its prompt (a vector, scores of classes) in place of a text. Field meanings are
    those of vLLM's ``PoolingParams``.

    Attributes:
        task: ``embed``, ``classify``, ``token_embed``, ``token_classify``; empty for the engine's own.
        second_from: Place in the prompt from which on tokens are of the second text of a pair, for models that tell the
            two apart by token types; None for a single text.
    """

    task: str = ""
    dimensions: int | None = None
    use_activation: bool | None = None
    second_from: int | None = None


class Pooled(msgspec.Struct, frozen=True, array_like=True):
    """A pooled output.

    Attributes:
        shape: Of the values: one length, or tokens and length.
        values: As float32, little-endian, row by row.
    """

    shape: list[int]
    values: bytes


#: A pooled output goes over the bus in pieces of this size, each in the place of one output token; it has at most so
#: many: what is larger would hold up the event loops that carry it.
PIECE_BYTES, PIECES_MAX = 262_144, 32


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters. Field meanings are vLLM's ``SamplingParams``. Stop *strings* are not included: ingress
    applies them.

    Attributes:
        max_tokens: Upper bound of output tokens of the whole sequence, counted from its first epoch. At least 1.
        logprobs: Number of top log-probabilities per token; None for none, 0 for the chosen token's only.
        seed: Seed of this sequence (already offset by the choice index); None for engine randomness.
        stop_token_ids: Extra ids that end the sequence, besides the model's EOS.
        allowed_token_ids: The only ids that may be sampled; None for all.
        bad_words: Runs of ids that may not be sampled.
        prompt_logprobs: As ``logprobs``, of the prompt's tokens; counts for a sequence without output.
        thinking_token_budget: Tokens of reasoning after which the engine ends it; None for no bound of its own.
        cache_salt: Kept apart in prefix caches from sequences with another one; empty for none.
        adapter: LoRA adapter that it is decoded with, in every epoch; None for the model itself.
        images: Of the prompt; None for text alone.
        pooling: Nothing is sampled: the output tokens stand for the pieces of what is pooled. None for a text.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    allowed_token_ids: list[int] | None = None
    bad_words: list[list[int]] = []
    prompt_logprobs: int | None = None
    thinking_token_budget: int | None = None
    cache_salt: str = ""
    structured: StructuredOutput | None = None
    adapter: Adapter | None = None
    images: Images | None = None
    pooling: Pooling | None = None

    @property
    def prefix_salt(self) -> str:
        """Text that is equal for sequences whose blocks of equal tokens hold the same KV and may be shared."""
        salt = self.cache_salt if self.images is None else f"{self.images.digest} {self.cache_salt}"
        return salt if self.adapter is None else f"{self.adapter.name}@{self.adapter.fingerprint} {salt}"

    @property
    def room(self) -> int:
        """Tokens that the output takes of the model's length, at most."""
        return self.max_tokens if self.pooling is None else 0


class SubmitSequence(Body, frozen=True, kw_only=True, tag="SubmitSequence/2"):
    """Asks a worker to decode a sequence. Idempotent per (sequence, epoch). Answered by SequenceAccepted or
    SequenceRefused.

    Attributes:
        sequence: Id, ``<request>.<index>``.
        epoch: Ownership epoch; 0 for the first placement.
        ingress: Name of the ingress that gets the tokens.
        ingress_incarnation: Start time of that ingress process, unix ns; a worker cancels what an earlier
            incarnation left.
        prompt_token_ids: The prompt, never changed over epochs.
        output_token_ids: Tokens already delivered in earlier epochs; decoding goes on after them (sampler state
            included).
        expected_output_tokens: Predicted output length of the whole sequence, tokens; None if unknown.
        deadline_ns: Unix ns after which the client no longer wants it; None for no deadline.
        handover: With a migrated sequence: its KV comes from another instance; None for one that is computed here.
        migration: With a sequence that migrates without its KV, which is computed here; else empty.
        output_logprobs: Of the last tokens of ``output_token_ids`` where the sequence was migrated: those that ingress
            may ask for again.
        replica: KV replica at this worker that a continuation begins on, as far as it is still there; else empty.
    """

    sequence: str
    epoch: int
    ingress: str
    ingress_incarnation: int
    prompt_token_ids: list[int]
    sampling: Sampling
    output_token_ids: list[int] = []
    expected_output_tokens: int | None = None
    deadline_ns: int | None = None
    handover: KvHandover | None = None
    output_logprobs: list[TokenLogprobs] | None = None
    migration: str = ""
    replica: str = ""


class RefusalReason(StrEnum):
    """Reason why a worker did not take a sequence. Closed set; each says whether another instance may be tried."""

    DRAINING = "draining"  # try another
    FULL = "full"  # the waiting queue is at its bound: try another
    STALE_EPOCH = "stale_epoch"  # a newer epoch is known here: the asker is behind
    TOO_LONG = "too_long"  # exceeds the model's limit: no instance will take it
    INVALID = "invalid"  # the engine refuses the parameters: no instance will take it
    ENGINE_DOWN = "engine_down"  # try another


class SequenceAccepted(Body, frozen=True, kw_only=True, tag="SequenceAccepted/1"):
    """The worker owns the sequence in this epoch.

    Attributes:
        kv_tokens: Tokens whose KV it has already and need not compute, of a sequence that came with KV or continues
            from a replica; 0 for any other.
    """

    sequence: str
    epoch: int
    kv_tokens: int = 0


class SequenceRefused(Body, frozen=True, kw_only=True, tag="SequenceRefused/1"):
    """The worker does not own the sequence; the asker still does."""

    sequence: str
    epoch: int
    reason: RefusalReason
    detail: str = ""


class CancelSequence(Body, frozen=True, kw_only=True, tag="CancelSequence/1"):
    """Stops a sequence up to and including ``epoch`` and frees its blocks. No answer; cancelling what is unknown
    is no error.
    """

    sequence: str
    epoch: int
    reason: str = ""


class ResendTokens(Body, frozen=True, kw_only=True, tag="ResendTokens/1"):
    """Asks for the tokens of a sequence from an index on. Answered by TokensResent, or by ErrorReply
    (``forgotten``) where the worker does not hold that sequence and epoch: never had it, restarted, acknowledged.
    """

    sequence: str
    epoch: int
    from_index: int


class AcknowledgeSequences(Body, frozen=True, kw_only=True, tag="AcknowledgeSequences/1"):
    """Ingress has every token of these finished sequences; the worker may forget them. Pairs of (sequence, epoch)."""

    sequences: list[tuple[str, int]]


class ReturnSequences(Body, frozen=True, kw_only=True, tag="ReturnSequences/2"):
    """Asks a worker to hand sequences back to their ingresses, which dispatch them anew: those without KV, waiting and
    preempted ones. No answer.
    """

    sequences: list[str]


class SetStepBudget(Body, frozen=True, kw_only=True, tag="SetStepBudget/1"):
    """Bounds the tokens that an engine's next steps compute, for a while: priority between prefill and decode.

    Running decodes come first in each step and prompts share what is left, so a smaller budget puts decodes first. No
    answer: summaries and snapshots tell the budget in force. The last order holds, until it expires.

    Attributes:
        incarnation: Of the worker that is meant; another one ignores the order.
        tokens: Of a step at most, within the engine's bounds; 0 for its own budget again.
        valid_ms: After this the engine has its own budget again, unless the order was repeated.
    """

    incarnation: int
    tokens: int
    valid_ms: int


class DrainWorker(Body, frozen=True, kw_only=True, tag="DrainWorker/1"):
    """Asks a worker to take no new work, finish what runs within the limit, and hand back the rest.

    Attributes:
        limit_ms: How long running sequences may go on before they are handed back.
    """

    limit_ms: int = 10_000


class ChangeAdapter(Body, frozen=True, kw_only=True, tag="ChangeAdapter/1"):
    """Asks a worker to load a LoRA adapter and offer it from now on, or to offer it no longer. Answered by
    AdapterChanged.

    Attributes:
        path: Empty to unload: sequences with it go on.
        replace: It may take the place of another one of that name; sequences that run with that keep it.
        key: Name of the API key that ordered it; empty where none is asked for.
    """

    name: str
    path: str = ""
    replace: bool = False
    key: str = ""


class AdapterChanged(Body, frozen=True, kw_only=True, tag="AdapterChanged/1"):
    """An adapter was loaded or unloaded, or why not.

    Attributes:
        adapter: What is offered under that name now; None for nothing.
        refusal: Why nothing has changed; empty where it has.
        missing: It was refused because there is no such adapter.
    """

    instance: str
    adapter: Adapter | None = None
    refusal: str = ""
    missing: bool = False
