"""The confidence judge: 100 · P(right) from the log-probabilities of the answer's own tokens.

Ingress computes the same in its own process and asks nobody; here it stands for askers that cannot, and beside vetoes.
"""

from __future__ import annotations

from collections.abc import Mapping

from millrace.contracts.judge import JudgeAnswer
from millrace.judging.confidence import ConfidenceModel

from services.judge.kinds.verdict import Verdict


def judge_confidence(question: JudgeAnswer, judges: Mapping[str, ConfidenceModel]) -> Verdict:
    """The least score of all choices; what the asker computed already where there is no judge of that model.

    Args:
        judges: By served model.
    """
    judge = judges.get(question.model)
    if judge is None:
        reason = f"no judge of {question.model} here"
        return Verdict(question.confidence, f"{reason}; the asker's own confidence" if _told(question) else reason)
    if not question.logprobs:
        return Verdict(question.confidence, "no log-probabilities were given")
    scores = [judge.score(logprobs) for logprobs in question.logprobs]
    known = [score for score in scores if score is not None]
    if len(known) < len(scores):
        return Verdict(None, "a choice has no usable log-probabilities")
    return Verdict(min(known), f"{judge.feature} of log-probabilities")


def _told(question: JudgeAnswer) -> bool:
    return question.confidence is not None
