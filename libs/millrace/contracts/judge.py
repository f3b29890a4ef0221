"""Messages a judge receives, and its answers."""

from __future__ import annotations

from millrace.contracts.message import Body


class JudgeAnswer(Body, frozen=True, kw_only=True, tag="JudgeAnswer/1"):
    """Asks how good an answer is.

    Attributes:
        request: Id of the attempt, ``<parent>~<number>``.
        cascade: Name of the cascade.
        tier: Position of the answering tier, from 0.
        model: Who answered.
        kind: Kind of judge that is asked: ``confidence``, ``llm``, ``verifier`` or ``external``.
        prompt: The rendered prompt; empty where the kind does not need it. At most 64 KiB, its end kept.
        answer: The answer's text, one per choice.
        logprobs: Log-probability of each generated token, one list per choice; empty where unknown.
        finish_reasons: One per choice.
        expected_output_tokens: p50 and p90 of the tagger; empty where unknown.
        structured: Kind of the output's constraint, ``json_schema``, ``regex``, ...; empty for none.
        constraint: The schema or expression itself; empty for none.
        tools: Names of the tools that the answer may call; empty for none.
        confidence: The score by confidence that ingress computed already; None where it has none.
        opinions: For the kind ``llm`` with a model of this cluster, which ingress has asked already: of each choice the
            likeliest first tokens of its verdict with their log-probabilities. Empty where the judge itself asks.
    """

    request: str
    cascade: str
    tier: int
    model: str
    kind: str
    prompt: str = ""
    answer: list[str] = []
    logprobs: list[list[float]] = []
    finish_reasons: list[str] = []
    expected_output_tokens: list[float] = []
    structured: str = ""
    constraint: str = ""
    tools: list[str] = []
    confidence: float | None = None
    opinions: list[list[tuple[str, float]]] = []


class AnswerJudged(Body, frozen=True, kw_only=True, tag="AnswerJudged/1"):
    """A score.

    Attributes:
        request: As asked.
        score: 0 to 100: 100 times the probability that the answer is right; the least of all choices. None where the
            judge cannot tell: the asker then goes by confidence.
        kind: Judge that answered; ``verifier`` where a veto decided.
        reason: One sentence.
        wall_us: Time it took, microseconds.
    """

    request: str
    score: float | None
    kind: str
    reason: str = ""
    wall_us: float = 0.0
