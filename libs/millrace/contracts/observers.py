"""Events that several receivers learn from: decisions and outcomes."""

from __future__ import annotations

import msgspec

from millrace.contracts.message import Body


class CandidateScore(msgspec.Struct, frozen=True, array_like=True):
    """One candidate of a decision.

    Attributes:
        name: Instance.
        score: The policy's score; which direction is better is in the policy's README, the decision's ``reason``
            says the unit.
        note: Why it was filtered out; empty where it was considered.
    """

    name: str
    score: float
    note: str = ""


class CandidateForecast(msgspec.Struct, frozen=True, array_like=True):
    """Prediction for one candidate of a decision (see LatencyPrediction). Times in ns from the decision.

    Attributes:
        note: Why there is no prediction; empty where there is one.
        placed_since: Sequences that the asker placed there after it had asked: the prediction does not know of them.
        cached_tokens: Of the prompt, expected in the prefix cache: what the times above stand on.
        others: Sequences there that share ``others_delay_ns``.
    """

    name: str
    ttft_ns: int = 0
    e2e_ns: int = 0
    tpot_mean_ns: int = 0
    preemptions: int = 0
    others_delay_ns: int = 0
    snapshot_age_ns: int = 0
    note: str = ""
    placed_since: int = 0
    cached_tokens: int = 0
    others: int = 0


class DecisionMade(Body, frozen=True, kw_only=True, tag="DecisionMade/1"):
    """A placement: what was decided, by which policy, why, with every candidate's score.

    Attributes:
        request: Request id.
        sequences: Sequences placed by this decision.
        epoch: Epoch in which the chosen instance shall own them.
        kind: ``dispatch`` or ``continuation``.
        policy: Name of the policy.
        chosen: Instance; empty where none could take it.
        reason: One sentence.
        wall_us: Time the decision took, microseconds.
        prompt_tokens: Prompt of each sequence, tokens.
        output_tokens: Tokens that each had decoded before (a continuation).
        max_tokens: The client's bound.
        expected_output_tokens: Predicted mean output; None if unknown.
        forecasts: Predictions of the instances asked; empty where the policy asks for none.
        fallback: Name of the policy that decided because predictions were missing; empty where none had to.
        block_size, block_hashes: Of each sequence's prompt, as in PredictLatency: what the chosen instance will have
            in its prefix cache.
    """

    request: str
    sequences: list[str]
    epoch: int
    kind: str
    policy: str
    model: str
    chosen: str
    reason: str
    scores: list[CandidateScore] = []
    at_ns: int = 0
    wall_us: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    max_tokens: int = 0
    expected_output_tokens: float | None = None
    forecasts: list[CandidateForecast] = []
    fallback: str = ""
    block_size: int = 0
    block_hashes: bytes = b""


class CascadeAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of a cascade's request.

    Attributes:
        request: Request id of the attempt, which has an outcome of its own.
        tier: Position of its model in the plan, from 0.
        outcome: ``delivered``, ``rejected``, ``rejected_early`` (before it was complete), ``failed`` or ``cancelled``.
        score: 0 to 100; None where it was not judged.
        judge: What the score comes from: a kind of judge, or ``confidence_uncalibrated``; empty without a score.
        threshold: Least score at which it would have been delivered; None where it was not judged.
        epoch: Of the cascade's plan by which it was judged.
        detail: A sentence where the judge did not answer or the attempt failed.
    """

    request: str
    tier: int
    model: str
    outcome: str
    score: float | None = None
    judge: str = ""
    threshold: float | None = None
    epoch: int = 0
    detail: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    started_ns: int = 0
    ended_ns: int = 0


class RequestFinished(Body, frozen=True, kw_only=True, tag="RequestFinished/1"):
    """Outcome of a request. Exactly one per accepted request.

    Attributes:
        outcome: ``completed``, ``cancelled``, ``failed`` or ``cut`` (slow reader).
        detail: A sentence where it did not complete.
        finish_reasons: One per choice.
        output_tokens: One per choice.
        continuations: How often any of its sequences went on elsewhere after a loss.
        migrations: How often any of them moved with its KV.
        predicted_output_tokens: The tagger's mean; None if unknown.
        predicted_ttft_ns: What the forecast of the chosen instance said at the first placement; None without one.
        predicted_e2e_ns: The same for the end.
        placed_ns: When the first placement was decided, unix ns: predictions count from here.
        ttft_ns: Time to first token; None if there was none.
        e2e_ns: Time from arrival to end.
        instances: Instances that decoded it, in order.
        predicted_cached_tokens: What ``predicted_ttft_ns`` assumed to be cached; None without a prediction.
        block_hashes: Chain hashes of the blocks behind those of the decision's ``block_hashes`` that the first sequence
            filled; empty where there were none in the decision.
        parent: Request of a cascade that this is an attempt of; empty for a client's own request.
        attempts: Of a cascade's request, in order. ``model`` is then the name of the cascade, and tokens and finish
            reasons are those of the delivered answer.
        reason: Why the cascade delivered that answer; empty without one.
    """

    request: str
    model: str
    outcome: str
    ingress: str
    key: str = ""
    detail: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: list[int] = []
    finish_reasons: list[str] = []
    continuations: int = 0
    predicted_output_tokens: float | None = None
    arrival_ns: int = 0
    ttft_ns: int | None = None
    e2e_ns: int = 0
    instances: list[str] = []
    predicted_ttft_ns: int | None = None
    predicted_e2e_ns: int | None = None
    placed_ns: int = 0
    migrations: int = 0
    predicted_cached_tokens: int | None = None
    block_hashes: bytes = b""
    parent: str = ""
    attempts: list[CascadeAttempt] = []
    reason: str = ""


class ProvisioningDecided(Body, frozen=True, kw_only=True, tag="ProvisioningDecided/1"):
    """A coordinator asks for more or fewer instances of a model: what, and why.

    Attributes:
        strategy: Name of the provisioning policy.
        action: ``start`` or ``stop``.
        count: Instances to be started or stopped.
        instances: Which ones are to be stopped; empty where some are to be started.
        reason: One sentence with units.
        serving: Instances that served when it was decided.
        starting: Those that were being started already.
        stopping: Those that were draining already.
        signal_ns: The latency that the policy looked at; None where there were too few samples, or it needs none.
        utilisation: Mean load of the serving instances, 0 to 1 (more where their queues are long).
    """

    model: str
    coordinator: str
    strategy: str
    action: str
    count: int
    reason: str
    instances: list[str] = []
    serving: int = 0
    starting: int = 0
    stopping: int = 0
    signal_ns: int | None = None
    utilisation: float = 0.0
    at_ns: int = 0
