"""Messages of brokers: loads, asks, bids and boundaries.

    source's broker     AskForMove         → a few candidates' brokers        ask.<model>.<candidate>
    candidate's broker  MoveBid            → source's broker, own worker      bid.<source>.<candidate>
    source's broker     MoveSequence       → its migrator                     migrate.<source>.move
    source's migrator   PrepareMigration   → the target's worker: the award   engine.<target>.prepare
    source's migrator   MigrationFinished  → both brokers                     migration.<model>.<source>.<target>
    source's broker     ReturnSequences    → the instance's worker            engine.<source>.return

A bid is a reservation with a deadline: its broker counts the blocks until then, and its worker takes no award without
an open bid. Each message may be lost, repeated or late; then a bid ends unused, and the source asks anew.

Source: CascadeInfer, sections 4.3 and 4.4. Differs in that an ask goes to a few candidates drawn by load, in that a bid
carries the delay that the move causes, and in that a receiver keeps no queue: its bids expire.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from millrace.contracts.bounds import DelayNs, Share, TimeNs, Tokens
from millrace.contracts.message import Body

#: A length that is not nothing.
Length = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]


class MoveReason(StrEnum):
    """Reason for a sequence to leave its instance, in order of precedence: its one intent is the first that applies."""

    ORDER = "order"  # an operator, or another service, wants it
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

    step_ns: TimeNs
    tokens: list[Tokens]
    blocks: list[Tokens]
    running: list[Tokens]


class LoadReported(msgspec.Struct, frozen=True, kw_only=True):
    """Load of an instance.

    Attributes:
        stage: Name in the plan; empty without a plan.
        plan_epoch: Of the plan that the broker knows; -1 without one.
        tokens: KV tokens of running sequences.
        waiting_tokens: Tokens that queued sequences will need at least.
        tokens_per_s: Tokens that it decodes, over the last seconds.
        queued_tokens: Lengths of the sequences for which its bids hold.
        length_counts, length_tokens: Histogram of the lengths of all its sequences: how many there are per bin of
            ``policies.stages.digest.STARTS``, and the sum of their lengths; bins behind the last one given are empty.
        draining: Takes nothing.
        memory_risk: Probability that it needs more KV blocks than there are before a few moves could end.
        curve: None where it cannot be forecast.
        why: What the broker does about its sequences, or why nothing moves, in one sentence.
    """

    instance: str
    incarnation: int
    model: str
    stage: str
    plan_epoch: int
    at_ns: TimeNs
    tokens: Tokens
    waiting_tokens: Tokens
    running: Tokens
    waiting: Tokens
    blocks_free: Tokens
    blocks_total: Tokens
    tokens_per_s: Annotated[float, msgspec.Meta(ge=0, lt=1e12)] = 0.0
    queued_tokens: Tokens = 0
    length_counts: list[Tokens] = []
    length_tokens: list[Tokens] = []
    draining: bool = False
    memory_risk: Share = 0.0
    curve: LoadCurve | None = None
    why: str = ""


class LoadsReported(Body, frozen=True, kw_only=True, tag="LoadsReported/2"):
    """Loads of the instances of a stage whose brokers share a process, to the brokers of their stage and of the stage
    before.

    Attributes:
        loads: At most one per instance.
    """

    loads: list[LoadReported]


class AskForMove(Body, frozen=True, kw_only=True, tag="AskForMove/2"):
    """Asks one candidate's broker for a bid. Answered by MoveBid.

    Attributes:
        ask: Id of the ask, which each bid for it repeats.
        prompt_tokens, output_tokens: Present length.
        blocks: KV blocks that it holds.
        max_tokens: The client's bound of the output.
        rest_p50, rest_p90: Predicted number of tokens still to come, median and 90th percentile; None if unknown.
        moves: Balance moves in its life so far.
        recompute: Its KV shall be computed anew, so that the engines need not fit.
        within_ms: Bids that come later are void.
        why: Why it shall leave, in one sentence.
    """

    ask: str
    sequence: str
    model: str
    source: str
    reason: MoveReason
    plan_epoch: int
    prompt_tokens: Length
    output_tokens: Tokens
    blocks: Tokens
    max_tokens: Length
    rest_p50: Length | None = None
    rest_p90: Length | None = None
    moves: Tokens = 0
    recompute: bool = False
    within_ms: int = 50
    why: str = ""


class BidRefusal(StrEnum):
    """Reason why a broker does not bid. Closed set."""

    NO_ROOM = "no_room"  # too few idle blocks, or the batch is full
    FULL = "full"  # as many bids hold as may
    DRAINING = "draining"  # it takes nothing
    STALE_PLAN = "stale_plan"  # one of the two knows an older plan
    NOT_READY = "not_ready"  # no fresh snapshot, or the bus was just away
    INCOMPATIBLE = "incompatible"  # KV cannot travel between the two
    TOO_LONG = "too_long"  # it does not fit the engine at all
    INVALID = "invalid"  # contradictory or absurd fields


class MoveBid(Body, frozen=True, kw_only=True, tag="MoveBid/2"):
    """Offers to take the sequence, or says why not. The award is the sequence's PrepareMigration.

    Attributes:
        refusal: None offers it; all that follows says nothing where it is refused.
        burden_ns: By how much later the bidder's sequences end with it, summed, by a simulation of the bidder.
        rest_ns: How long the sequence would run there; 0 where not forecast.
        load_tokens: What the bidder carries, open bids included.
        blocks_idle: KV blocks that would be idle with it.
        preemptions: That it would cause.
        valid_ms: How long the bid holds, from its receipt on.
    """

    ask: str
    sequence: str
    source: str
    bidder: str
    plan_epoch: int
    refusal: BidRefusal | None = None
    burden_ns: DelayNs = 0
    load_tokens: Tokens = 0
    blocks_idle: Tokens = 0
    rest_ns: TimeNs = 0
    preemptions: Tokens = 0
    valid_ms: Tokens = 0


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
    length: Length
    plan_epoch: int
    version: int
    keeper: str
    at_ns: int
    why: str = ""
