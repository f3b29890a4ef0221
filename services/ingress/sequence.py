"""One open sequence: its token log, its owner, its retries and its output text. Data only."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from millrace.contracts.ingress import EngineTimes, TokenLogprobs
from millrace.contracts.migration import KvReplicated
from millrace.contracts.sequences import SequenceId
from millrace.contracts.worker import Sampling

from services.ingress.calls.messages import DeltaLogprob
from services.ingress.cluster.instances import KnownInstance
from services.ingress.dispatch.prefix_blocks import PromptBlocks
from services.ingress.lifecycle import SequencePhase
from services.ingress.tokens.detokenizer import TextStream
from services.ingress.tokens.evidence import TokenEvidence

if TYPE_CHECKING:
    from services.ingress.calls.open_call import OpenCall


@dataclass(slots=True, eq=False)
class OutputText:
    """Text of a sequence's log.

    Attributes:
        lazy: The call neither streams nor has stop strings: its tokens are detokenized once, at the end.
        pushed: Tokens of the log that were detokenized.
        held_logprobs: Of tokens that were not detokenized yet.
        finish_reason: ``stop`` or ``length``; empty while it goes on.
        stop_reason: Stop string or token id that ended it.
        prompt_logprobs: Those that came and were not told yet.
        pooled: Pieces of a pooled output, one per token of the log.
    """

    stream: TextStream
    lazy: bool
    pushed: int = 0
    held_logprobs: list[DeltaLogprob] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str | int | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    pooled: list[bytes] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class RetryState:
    """Attempts to find an instance since the sequence was last owned by one.

    Attributes:
        tries: Submissions in this round.
        rounds: Pauses so far.
        since_ns: When it lost its instance, arrived, or first found none; 0 while it is owned.
        excluded: Instance -> incarnation that failed it.
        fruitless: Failovers in a row without a new token, but for those where an instance gave it back in order.
        errors, deaths: Those among them where the engine ended the sequence with an error, or died while it had it.
        lost: It lost an instance, whether that had answered or not.
        suspect: An instance was lost when it had come there and decoded nothing: it is tried alone, or not at all.
        alone: Its present submission is a trial, and only sequences are on that instance whose own trials passed there.
        tried: It has been on trial since it last lost its instance.
        why: Why its instance was lost; empty for none.
    """

    since_ns: int
    tries: int = 0
    rounds: int = 0
    at_ns: int = 0
    excluded: dict[str, int] = field(default_factory=dict)
    fruitless: int = 0
    errors: int = 0
    deaths: int = 0
    lost: bool = False
    suspect: bool = False
    alone: bool = False
    tried: bool = False
    why: str = ""

    def progressed(self) -> None:
        """Forget failures: a new token arrived."""
        self.fruitless = self.errors = self.deaths = 0
        self.alone = self.suspect = False

    def owned(self) -> None:
        """Reset all but the failures without a new token: an instance owns the sequence."""
        self.tries = self.rounds = self.since_ns = 0
        self.excluded = {}
        self.why = ""


@dataclass(slots=True, eq=False)
class ResendState:
    """Questions to the instance about tokens after the log.

    Attributes:
        correlation: Of the open ResendTokens; empty for none.
        failures: Unanswered ones in a row.
        after_ns, at_ns: Silence after which the next probe is due, and when the latest was sent.
    """

    correlation: str = ""
    failures: int = 0
    after_ns: int = 0
    at_ns: int = 0


@dataclass(slots=True, eq=False)
class DispatchSpan:
    """Trace span of the present placement.

    Attributes:
        attributes: None where the trace is not sampled, or after the span was recorded.
    """

    context: str = ""
    start_ns: int = 0
    attributes: dict[str, Any] | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class EpochGrant:
    """An epoch that a migration's target may decode in. Open until the target is proven to hold the sequence
    (``migration/ownership.py``) or the grant is revoked.

    Attributes:
        instance, incarnation: The target, when the epoch was granted.
        source: Owner of the sequence at that time.
        tokens: Length of the log up to which the target's tokens need no comparison.
        span: Context of the migration's span.
        proof: Correlation of the open question to the target; empty for none.
    """

    migration: str
    epoch: int
    source: KnownInstance
    instance: KnownInstance
    incarnation: int
    tokens: int
    at_ns: int
    span: str
    proof: str = ""


@dataclass(slots=True, eq=False)
class OpenSequence:
    """One choice of one prompt, from admission to its end.

    Attributes:
        log: All output tokens so far, over all epochs. A failover resubmits prompt and log.
        phase: State in ``lifecycle.py``; changed by ``transitions.py`` only.
        owned: Whether an instance ever accepted it: later submissions are failovers.
        epoch, epoch_max: The current epoch, and the highest that was ever submitted or granted.
        grant: The open one; only in RUNNING and VERIFYING.
        replica: A KV replica of its present epoch, which may be that in which it lost its instance, as its migrator
            told it last; None for none.
        revoked: Latest few migrations whose grants were revoked: late questions of them are refused.
        instance, incarnation: Where it is, and the incarnation that was asked.
        moved: It came to its instance by a migration in this epoch.
        fresh: No token arrived in this epoch.
        placed_ns: When it was submitted to its instance, then when that accepted it.
        last_ns: Latest token, or admission.
        asking, submit: Correlations of the open questions to predictors and to the worker; empty for none.
        blocks: Hashes of its prompt's blocks; None until a predictor is asked.
        sampling: As engines are told.
        told_logprobs: Log-probabilities per token that the client asked for; None for none.
        times: Its course at the instance that ended it, where that told it.
        evidence: Log-probabilities of its tokens, where ingress judges the answer.
    """

    call: OpenCall
    index: int
    sampling: Sampling
    stream: InitVar[TextStream]
    last_ns: int
    phase: SequencePhase = SequencePhase.WAITING
    id: str = field(init=False)
    prompt: list[int] = field(init=False)
    tokens_max: int = field(init=False)
    told_logprobs: int | None = field(init=False)
    evidence: TokenEvidence | None = None
    times: EngineTimes | None = None
    output: OutputText = field(init=False)
    log: list[int] = field(default_factory=list)
    epoch: int = -1
    epoch_max: int = -1
    grant: EpochGrant | None = None
    replica: KvReplicated | None = None
    revoked: tuple[str, ...] = ()
    instance: KnownInstance | None = None
    incarnation: int = 0
    owned: bool = False
    moved: bool = False
    fresh: bool = True
    placed_ns: int = 0
    submit: str = ""
    asking: str = ""
    blocks: PromptBlocks | None = None
    retry: RetryState = field(init=False)
    resend: ResendState = field(default_factory=ResendState)
    span: DispatchSpan = field(default_factory=DispatchSpan)

    def __post_init__(self, stream: TextStream) -> None:
        call = self.call.call
        self.id = str(SequenceId(call.request, self.index))
        self.prompt = call.prompts[self.index // call.n]
        self.tokens_max = self.sampling.max_tokens
        self.told_logprobs = self.sampling.logprobs
        if call.judged:
            self.evidence = TokenEvidence()
            if self.told_logprobs is None:
                self.sampling = msgspec.structs.replace(self.sampling, logprobs=0)
        self.output = OutputText(stream, lazy=not call.stream and not call.stop)
        self.retry = RetryState(self.last_ns)

    def next_epoch(self) -> int:
        """An epoch above all that were ever submitted or granted."""
        self.epoch_max += 1
        return self.epoch_max

    def decoded_blocks(self) -> bytes:
        """Packed hashes of the blocks behind the prompt that an ended sequence leaves in a prefix cache."""
        decoded = self.blocks is not None and self.sampling.pooling is None
        return self.blocks.decoded(self.prompt, self.log) if self.blocks is not None and decoded else b""
