"""Messages of brokers: loads, asks, bids, deals and boundaries.

    source's broker     AskForMove                  → a few candidates' brokers   ask.<model>.<candidate>
    candidate's broker  MoveBid, NoBid              → source's broker             bid.<source>
    source's broker     OfferDeal                   → the chosen bidder's broker  deal.<target>
    target's broker     GrantDeal                   → source's broker             deal.<source>
    source's broker     DealStarted, WithdrawDeal,
                        DealEnded                   → target's broker             deal.<target>
    source's migrator   EvacuationAnnounced         → the instance's broker       evacuation.<instance>
    source's broker     ReturnSequences             → the instance's worker       engine.<instance>.return

A deal is named by the id of its ask. Each message may be lost, repeated or late: a deal has one identity, (sequence,
epoch, deal), and every step of it has a deadline by the clock of whoever waits. The source's migrator executes a
granted deal (MigrateSequence); ingress judges epochs as with any migration.

Source: CascadeInfer, sections 4.3 and 4.4. Differs in that an ask goes to a few candidates drawn by load, in that a bid
carries the delay that the move causes, and in that a grant has a deadline.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from millrace.contracts.kv import KvRefusal
from millrace.contracts.message import Body
from millrace.contracts.migration import MigrationOutcome
from millrace.contracts.observers import CandidateScore


class MoveReason(StrEnum):
    """Reason for a sequence to leave its instance, in order of precedence: its one intent is the first that applies."""

    DRAIN = "drain"  # the instance is to stop
    MEMORY = "memory"  # its KV memory is forecast to run short
    HANDOFF = "handoff"  # its prompt is done and the instance only prefills
    BOUNDARY = "boundary"  # the sequence has outgrown the instance's stage
    BALANCE = "balance"  # the instance carries more than the others of its stage


class LoadCurve(msgspec.Struct, frozen=True, array_like=True):
    """Forecast load of an instance at equal steps from now on: point ``i`` is at ``i * step_ns``.

    Attributes:
        tokens: KV tokens held by running sequences.
        blocks: KV blocks in use.
        running: Sequences in the batch.
    """

    step_ns: int
    tokens: list[int]
    blocks: list[int]
    running: list[int]


class LoadReported(Body, frozen=True, kw_only=True, tag="LoadReported/1"):
    """Load of an instance, sent by its broker to the brokers of its stage and of the stage before.

    Attributes:
        stage: Name in the plan; empty without a plan.
        plan_epoch: Of the plan that the broker knows; -1 without one.
        tokens: KV tokens of running sequences.
        waiting_tokens: Tokens that queued sequences will need at least.
        tokens_per_s: Tokens that it decodes, over the last seconds.
        outgoing, incoming: Transfers under way.
        queued_tokens: Lengths of the sequences that it has agreed to take and that have not begun to move.
        length_counts, length_tokens: Histogram of the lengths of all its sequences: how many there are per bin of
            ``policies.stages.digest.STARTS``, and the sum of their lengths; bins behind the last one given are empty.
        draining: Takes nothing.
        memory_risk: Probability that it needs more KV blocks than there are before a few moves could end.
        curve: None where it cannot be forecast.
    """

    instance: str
    incarnation: int
    model: str
    stage: str
    plan_epoch: int
    at_ns: int
    tokens: int
    waiting_tokens: int
    running: int
    waiting: int
    blocks_free: int
    blocks_total: int
    tokens_per_s: float = 0.0
    outgoing: int = 0
    incoming: int = 0
    queued_tokens: int = 0
    length_counts: list[int] = []
    length_tokens: list[int] = []
    draining: bool = False
    memory_risk: float = 0.0
    curve: LoadCurve | None = None


class LoadsReported(Body, frozen=True, kw_only=True, tag="LoadsReported/1"):
    """Loads of several instances of a stage whose brokers share a process, in one message.

    Attributes:
        loads: At most one per instance.
    """

    loads: list[LoadReported]


class AskForMove(Body, frozen=True, kw_only=True, tag="AskForMove/1"):
    """Asks one candidate's broker for a bid. Answered by MoveBid or NoBid on ``bid.<source>``.

    Attributes:
        deal: Id of the ask, and of the deal that may come of it.
        epoch: In which the source holds the sequence; -1 where it does not know.
        prompt_tokens, output_tokens: Present length.
        blocks: KV blocks that it holds.
        max_tokens: The client's bound of the output.
        rest_p50, rest_p90: Predicted number of tokens still to come, median and 90th percentile; None if unknown.
        gain_ns: By how much sooner the source's other sequences end without it, summed.
        stay_ns: How long it would still run at the source; 0 where not forecast.
        load_tokens: What the source carries.
        queued_tokens: Lengths of all sequences that the source wants to move: its priority in the target's queue.
        moves: Balance moves in its life so far.
        within_ms: Bids that come later are void.
    """

    deal: str
    sequence: str
    epoch: int
    model: str
    source: str
    reason: MoveReason
    plan_epoch: int
    prompt_tokens: int
    output_tokens: int
    blocks: int
    max_tokens: int
    rest_p50: int | None = None
    rest_p90: int | None = None
    gain_ns: int = 0
    stay_ns: int = 0
    load_tokens: int = 0
    queued_tokens: int = 0
    moves: int = 0
    within_ms: int = 50


class MoveBid(Body, frozen=True, kw_only=True, tag="MoveBid/1"):
    """Offers to take the sequence.

    Attributes:
        burden_ns: By how much later the bidder's sequences end with it, summed, by a simulation of the bidder.
        rest_ns: How long the sequence would run there; 0 where not forecast.
        load_tokens: What the bidder carries, agreed arrivals included.
        blocks_idle: KV blocks that would be idle with it.
        preemptions: That it would cause.
        start_ms: Earliest start of the transfer, from now.
        valid_ms: How long the bid holds, from now, by the bidder's clock.
    """

    deal: str
    sequence: str
    epoch: int
    source: str
    bidder: str
    plan_epoch: int
    burden_ns: int
    load_tokens: int
    blocks_idle: int
    rest_ns: int = 0
    preemptions: int = 0
    start_ms: int = 0
    valid_ms: int = 1_000


class DealRefusal(StrEnum):
    """Reason why a broker does not bid, or does not make or continue a deal. Closed set."""

    NO_ROOM = "no_room"  # too few idle blocks, or the batch is full
    FULL = "full"  # the queue of agreed arrivals is at its bound
    DRAINING = "draining"  # it takes nothing
    STALE_PLAN = "stale_plan"  # one of the two knows an older plan
    NOT_READY = "not_ready"  # no fresh snapshot, or the bus was just away
    INCOMPATIBLE = "incompatible"  # KV cannot travel between the two
    TOO_LONG = "too_long"  # it does not fit the engine at all
    NO_BID = "no_bid"  # no bid of that name is open here: it has expired, or was never given
    UNKNOWN = "unknown"  # no such deal, or the sequence has left
    FORGED = "forged"  # the sender is not the broker of that instance
    INVALID = "invalid"  # contradictory or absurd fields


class NoBid(Body, frozen=True, kw_only=True, tag="NoBid/1"):
    """The candidate does not want it."""

    deal: str
    sequence: str
    source: str
    bidder: str
    reason: DealRefusal
    detail: str = ""


class OfferDeal(Body, frozen=True, kw_only=True, tag="OfferDeal/1"):
    """Accepts a bid. Idempotent. Answered by DealQueued or DealRefused.

    Attributes:
        why: Why this bidder, one sentence.
        scores: Of the bids, by the policy's score; lower is better.
        hold_ms: The source waits so long for a grant; then the deal is over on both sides.
    """

    deal: str
    sequence: str
    epoch: int
    source: str
    target: str
    reason: MoveReason
    plan_epoch: int
    tokens: int
    blocks: int
    queued_tokens: int = 0
    moves: int = 0
    why: str = ""
    scores: list[CandidateScore] = []
    hold_ms: int = 10_000


class DealQueued(Body, frozen=True, kw_only=True, tag="DealQueued/1"):
    """The target expects the sequence.

    Attributes:
        granted: A slot is the sequence's: it may start at once. Else GrantDeal follows.
        position: In the target's queue; 0 where granted.
        start_within_ms: With a grant: the slot is free for others after so long without a start.
    """

    deal: str
    sequence: str
    epoch: int
    granted: bool
    position: int = 0
    start_within_ms: int = 0


class DealRefused(Body, frozen=True, kw_only=True, tag="DealRefused/1"):
    """A broker's no to an offer or to a grant; the deal is over there."""

    deal: str
    sequence: str
    reason: DealRefusal
    detail: str = ""


class GrantDeal(Body, frozen=True, kw_only=True, tag="GrantDeal/1"):
    """A slot of the target is the sequence's. Answered by DealStarted, DealPostponed or DealRefused.

    Attributes:
        starving: The source was too busy several times: the target keeps this slot for it, and the source moves it
            next.
    """

    deal: str
    sequence: str
    epoch: int
    source: str
    target: str
    start_within_ms: int
    starving: bool = False


class DealStarted(Body, frozen=True, kw_only=True, tag="DealStarted/1"):
    """The source's migrator was told to move it: the answer to a grant, or published where the offer's answer granted
    already.
    """

    deal: str
    sequence: str
    epoch: int
    source: str
    target: str


class DealPostponed(Body, frozen=True, kw_only=True, tag="DealPostponed/1"):
    """The source has no free slot for it now. Of a starving one it keeps the grant and starts it next."""

    deal: str
    sequence: str
    epoch: int
    outgoing: int


class WithdrawDeal(Body, frozen=True, kw_only=True, tag="WithdrawDeal/1"):
    """The source does not want the deal any more. No answer; an unknown one is no error."""

    deal: str
    sequence: str
    epoch: int
    source: str
    target: str
    detail: str = ""


class DealEnded(Body, frozen=True, kw_only=True, tag="DealEnded/1"):
    """The migration is over, well or not: the target's slot is free. No answer.

    Attributes:
        moves: Balance moves in the sequence's life, this one included.
        duration_ns: Of the migration.
    """

    deal: str
    sequence: str
    epoch: int
    source: str
    target: str
    outcome: MigrationOutcome
    moves: int = 0
    refusal: KvRefusal | None = None
    duration_ns: int = 0
    detail: str = ""


class EvacuationAnnounced(Body, frozen=True, kw_only=True, tag="EvacuationAnnounced/1"):
    """Everything shall leave the instance: its broker carries it out, its migrator answers who asked for it. Repeated
    while the evacuation goes on. No answer.

    Attributes:
        left_ms: Until its limit, from now; 0 says that it is over.
    """

    instance: str
    left_ms: int


class BoundaryMoved(Body, frozen=True, kw_only=True, tag="BoundaryMoved/1"):
    """Current boundary between a stage and the next. Its keeper repeats it at every round, moved or not.

    Attributes:
        stage: The lower of the two stages.
        next_stage: The one above.
        length: First length, in tokens, that belongs to the upper one.
        plan_epoch: Of the plan that it refines; void with any other.
        version: Rises with each change within a plan's epoch. A new keeper goes on from the last one that it heard.
        keeper: Instance whose broker keeps the boundary.
        why: One sentence.
    """

    model: str
    stage: str
    next_stage: str
    length: int
    plan_epoch: int
    version: int
    keeper: str
    at_ns: int
    why: str = ""
