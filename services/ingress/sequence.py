"""One open sequence: its token log, its owner, its retries and its output text. Data only."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from millrace.contracts.migration import KvReplicated
from millrace.contracts.sequences import SequenceId
from millrace.contracts.worker import Sampling

from services.ingress.calls.messages import DeltaLogprob
from services.ingress.cluster.instances import KnownInstance
from services.ingress.dispatch.prefix_blocks import PromptBlocks
from services.ingress.lifecycle import TRANSITIONS, Guard, Reaction, SequenceEvent, SequencePhase
from services.ingress.tokens.detokenizer import TextStream
from services.ingress.tokens.evidence import TokenEvidence

if TYPE_CHECKING:
    from services.ingress.calls.open_call import OpenCall


class OutputText:
    """Text of a sequence's log.

    Attributes:
        stream: Detokenizer with its stop strings.
        lazy: The call neither streams nor has stop strings: its tokens are detokenized once, at the end.
        pushed: Tokens of the log that were detokenized.
        held_text, held_logprobs: For calls that do not stream: output that is delivered with the end.
        finish_reason: ``stop`` or ``length``; empty while it goes on.
        stop_reason: Stop string or token id that ended it.
    """

    __slots__ = ("finish_reason", "held_logprobs", "held_text", "lazy", "pushed", "stop_reason", "stream")

    def __init__(self, stream: TextStream, *, lazy: bool) -> None:
        self.stream = stream
        self.lazy = lazy
        self.pushed = 0
        self.held_text: list[str] = []
        self.held_logprobs: list[DeltaLogprob] = []
        self.finish_reason = ""
        self.stop_reason: str | int | None = None


class RetryState:
    """Attempts to find an instance since the sequence was last owned by one.

    Attributes:
        tries: Submissions in this round.
        rounds: Pauses so far.
        at_ns: When it is dispatched again.
        since_ns: When it lost its instance, or arrived; 0 while it is owned.
        excluded: Instance -> incarnation that failed it.
        fruitless: Failovers in a row without a new token.
        errors, deaths: Those among them where the engine ended the sequence with an error, or died while it had it.
        suspect: An instance was lost when it had come there and decoded nothing: it is tried alone, or not at all.
        alone: Its present submission is a trial, and no other sequence is on that instance.
        why: Why its instance was lost; empty for none.
    """

    __slots__ = (
        "alone", "at_ns", "deaths", "errors", "excluded", "fruitless", "rounds", "since_ns", "suspect", "tries", "why",
    )  # fmt: skip

    def __init__(self, now_ns: int) -> None:
        self.tries = 0
        self.rounds = 0
        self.at_ns = 0
        self.since_ns = now_ns
        self.excluded: dict[str, int] = {}
        self.fruitless = self.errors = self.deaths = 0
        self.alone = self.suspect = False
        self.why = ""

    def progressed(self) -> None:
        """Forget failures: a new token arrived."""
        self.fruitless = self.errors = self.deaths = 0
        self.alone = self.suspect = False

    def owned(self) -> None:
        """Reset all but the failures without a new token: an instance owns the sequence."""
        self.tries = self.rounds = self.since_ns = 0
        self.excluded = {}
        self.why = ""


class ResendState:
    """Questions to the instance about tokens after the log.

    Attributes:
        correlation: Of the open ResendTokens; empty for none.
        failures: Unanswered ones in a row.
        after_ns, at_ns: Silence after which the next probe is due, and when the latest was sent.
    """

    __slots__ = ("after_ns", "at_ns", "correlation", "failures")

    def __init__(self) -> None:
        self.correlation = ""
        self.failures = 0
        self.after_ns = 0
        self.at_ns = 0


class DispatchSpan:
    """Trace span of the present placement.

    Attributes:
        context: ``traceparent`` of the span.
        attributes: None where the trace is not sampled, or after the span was recorded.
    """

    __slots__ = ("attributes", "context", "start_ns")

    def __init__(self) -> None:
        self.context = ""
        self.start_ns = 0
        self.attributes: dict[str, Any] | None = None


class EpochGrant:
    """An epoch that a migration's target may decode in. Open until the target is proven to hold the sequence
    (``migration/ownership.py``) or the grant is revoked.

    Attributes:
        instance, incarnation: The target, when the epoch was granted.
        source: Owner of the sequence at that time.
        tokens: Length of the log up to which the target's tokens need no comparison.
        at_ns: When it was granted.
        span: Context of the migration's span.
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
        self.incarnation = target.member.incarnation
        self.tokens = len(sequence.log)
        self.at_ns = now_ns
        self.span = span
        self.proof = ""


class HeldReplica:
    """A KV replica of a sequence at another instance, as its migrator told it last.

    Attributes:
        epoch: Of the tokens whose KV it has.
        instance, incarnation: Of the holder.
        tokens: Whose KV it has, prompt included.
    """

    __slots__ = ("epoch", "incarnation", "instance", "name", "tokens")

    def __init__(self, body: KvReplicated) -> None:
        self.name = body.replica
        self.epoch = body.epoch
        self.instance = body.instance
        self.incarnation = body.incarnation
        self.tokens = body.tokens


class OpenSequence:
    """One choice of one prompt, from admission to its end.

    Attributes:
        log: All output tokens so far, over all epochs. A failover resubmits prompt and log.
        phase: State in ``lifecycle.py``; changed by ``advance`` only.
        owned: Whether an instance ever accepted it: later submissions are failovers.
        epoch, epoch_max: The current epoch, and the highest that was ever submitted or granted.
        grant: The open one; only in RUNNING and VERIFYING.
        replica: A KV replica of its present epoch, which may be that in which it lost its instance; None for none.
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
        evidence: Log-probabilities of its tokens, where ingress judges the answer.
    """

    __slots__ = (
        "_phase",
        "asking",
        "blocks",
        "call",
        "epoch",
        "epoch_max",
        "evidence",
        "fresh",
        "grant",
        "id",
        "incarnation",
        "index",
        "instance",
        "last_ns",
        "log",
        "moved",
        "output",
        "owned",
        "placed_ns",
        "prompt",
        "replica",
        "resend",
        "retry",
        "revoked",
        "sampling",
        "span",
        "submit",
        "tokens_max",
        "told_logprobs",
    )

    def __init__(self, call: OpenCall, index: int, sampling: Sampling, stream: TextStream, now_ns: int) -> None:
        self.call = call
        self.index = index
        self.id = str(SequenceId(call.request, index))
        self.prompt = call.call.prompts[index // call.call.n]
        self.told_logprobs = sampling.logprobs
        self.evidence = TokenEvidence() if call.call.judged else None
        if self.evidence is not None and sampling.logprobs is None:
            sampling = msgspec.structs.replace(sampling, logprobs=0)
        self.sampling = sampling
        self.tokens_max = sampling.max_tokens
        self.output = OutputText(stream, lazy=not call.call.stream and not call.call.stop)
        self.log: list[int] = []
        self._phase = SequencePhase.WAITING
        self.epoch = self.epoch_max = -1
        self.grant: EpochGrant | None = None
        self.replica: HeldReplica | None = None
        self.revoked: tuple[str, ...] = ()
        self.instance: KnownInstance | None = None
        self.incarnation = 0
        self.owned = False
        self.moved = False
        self.fresh = True
        self.placed_ns = 0
        self.last_ns = now_ns
        self.submit = ""
        self.asking = ""
        self.blocks: PromptBlocks | None = None
        self.retry = RetryState(now_ns)
        self.resend = ResendState()
        self.span = DispatchSpan()

    @property
    def phase(self) -> SequencePhase:
        """Its state."""
        return self._phase

    def advance(self, event: SequenceEvent, holds: Callable[[Guard], bool]) -> Reaction:
        """Take the transition of an event and return its reaction.

        Raises:
            TransitionRefused: the table lists none.
        """
        row = TRANSITIONS.take(self._phase, type(event), holds, who=self.id)
        self._phase = row.target
        return row.reaction

    def next_epoch(self) -> int:
        """An epoch above all that were ever submitted or granted."""
        self.epoch_max += 1
        return self.epoch_max

    def decoded_blocks(self) -> bytes:
        """Packed hashes of the blocks behind the prompt that an ended sequence leaves in a prefix cache."""
        return self.blocks.decoded(self.prompt, self.log) if self.blocks is not None else b""
