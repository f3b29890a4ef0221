"""Messages a judge receives, and its answers."""

from __future__ import annotations

from millrace.contracts.message import Body


class JudgeAnswer(Body, frozen=True, kw_only=True, tag="JudgeAnswer/2"):
    """Asks how good an answer is.

    Attributes:
        request: Id of the attempt, ``<parent>~<number>``.
        cascade: Name of the cascade.
        model: Who answered.
        prompt: The rendered prompt. At most 64 KiB, its end kept.
        answer: The answer's text, one per choice.
    """

    request: str
    cascade: str
    model: str
    prompt: str = ""
    answer: list[str] = []


class AnswerJudged(Body, frozen=True, kw_only=True, tag="AnswerJudged/1"):
    """A score.

    Attributes:
        request: As asked.
        score: 0 to 100: 100 times the probability that the answer is right; the least of all choices. None where the
            judge cannot tell: the asker then goes by confidence.
        kind: Of the judge.
        reason: One sentence.
        wall_us: Time it took, microseconds.
    """

    request: str
    score: float | None
    kind: str
    reason: str = ""
    wall_us: float = 0.0
