"""Messages a predictor receives, and its answers: what would happen if an instance took this request?"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from millrace.contracts.message import Body


class PredictLatency(Body, frozen=True, kw_only=True, tag="PredictLatency/1"):
    """Asks one instance's predictor to simulate the instance forward with this request added to it.

    Attributes:
        request: Id.
        instance: Whose future is asked for.
        model: Served model name.
        prompt_tokens: Length of the prompt, tokens.
        output_tokens: Tokens already decoded elsewhere, which have to be computed again (a continuation).
        max_tokens: The client's bound, tokens.
        expected_output_tokens: Predicted mean length of the whole output, tokens; None if unknown.
        sequences: Choices that are placed together.
        block_size: Of the blocks that ``block_hashes`` names, tokens; 0 where there are none.
        block_hashes: Chain hashes of the prompt's full blocks from the first on (kvcache.chain), packed; empty where
            not asked for.
    """

    request: str
    instance: str
    model: str
    prompt_tokens: int
    max_tokens: int
    output_tokens: int = 0
    expected_output_tokens: float | None = None
    sequences: int = 1
    block_size: int = 0
    block_hashes: bytes = b""


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Forecast for an instance that takes a request now. Times in ns, counted from now.

    Attributes:
        ttft_ns: Until the first new token of any of the request's sequences.
        e2e_ns: Until the last token of all of them.
        tpot_mean_ns: Mean time per new token after the first, over all of its sequences; 0 where there is no second.
        tpot_worst_ns: Longest pause between two tokens of one of its sequences.
        blocks_peak: Most KV blocks in use at the instance while the request is there.
        preemptions: Preemptions at the instance in that time.
        others: Sequences that are there already, placements on their way included.
        others_delay_ns: Sum over these of how much later each ends for the request; may be negative by a step.
        output_tokens: Length of the whole output that was assumed, per sequence.
    """

    ttft_ns: int
    e2e_ns: int
    tpot_mean_ns: int = 0
    tpot_worst_ns: int = 0
    blocks_peak: int = 0
    preemptions: int = 0
    others: int = 0
    others_delay_ns: int = 0
    output_tokens: int = 0


class LatencyPrediction(Body, Forecast, frozen=True, kw_only=True, tag="LatencyPrediction/1"):
    """Result of the simulation of one instance, counted from the moment of the answer.

    Attributes:
        incarnation: Of the instance whose snapshot was rolled forward.
        snapshot_age_ns: Age of the status snapshot that was rolled forward.
        cached_tokens: Of the prompt, expected to be in the instance's prefix cache and therefore not computed.
    """

    request: str
    instance: str
    incarnation: int
    snapshot_age_ns: int = 0
    cached_tokens: int = 0


class NoPredictionReason(StrEnum):
    """Reason why a predictor has no answer. Closed set."""

    NO_SNAPSHOT = "no_snapshot"  # nothing heard of that instance
    STALE_SNAPSHOT = "stale_snapshot"  # the last one is too old to be rolled forward
    OTHER_MODEL = "other_model"  # the instance serves another model
    NO_STEP_TIME = "no_step_time"  # neither a parameter file nor enough observed steps
    DRAINING = "draining"  # it takes no new work
    TOO_LONG = "too_long"  # the request does not fit the engine at all


class NoPrediction(Body, frozen=True, kw_only=True, tag="NoPrediction/1"):
    """The predictor cannot say; the asker decides without it."""

    request: str
    instance: str
    reason: NoPredictionReason
    detail: str = ""
