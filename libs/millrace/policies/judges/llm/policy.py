"""LLM: a model is asked whether the answer is right, and the score is 100 · P("yes").

`millrace-judge` ships and was trained on this question; any other model may be named, and its verdicts are only as good
as that model is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from millrace.judging.calibration import IsotonicCurve
from millrace.judging.question import NO, YES, judging_question
from millrace.policies.judges.verdict import Judged, Verdict, first_choice

#: First tokens looked at; ingress gives at most 20.
TOP_TOKENS = 20


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Calibration of the verdicts.

    Attributes:
        curve: From P("yes") to P(right); None for none.
        curves: Of single answering models, by served name; they come before ``curve``.
    """

    curve: IsotonicCurve | None = None
    curves: dict[str, IsotonicCurve] = {}


class _TopToken(msgspec.Struct):
    token: str
    logprob: float


class _TokenLogprobs(msgspec.Struct):
    top_logprobs: list[_TopToken]


class _Logprobs(msgspec.Struct):
    content: list[_TokenLogprobs]


def question(answer: Judged, parameters: Parameters) -> dict[str, Any]:
    """Asks for one token."""
    return {
        "messages": [{"role": "user", "content": judging_question(answer.prompt, answer.text)}],
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": TOP_TOKENS,
    }


def verdict(payload: bytes, answer: Judged, parameters: Parameters) -> Verdict:
    """100 · P("yes") over P("yes") + P("no") of the first token; none where neither is among the likeliest."""
    choice = first_choice(payload)
    if choice is None:
        return Verdict(None, "the judge's answer is no chat completion")
    try:
        told = msgspec.convert(choice.logprobs, _Logprobs)
    except msgspec.ValidationError:
        return Verdict(None, "the judge's answer has no log-probabilities")
    if not told.content:
        return Verdict(None, "the judge answered nothing")
    tokens = [(each.token, each.logprob) for each in told.content[0].top_logprobs]
    yes, no = (_probability(tokens, word) for word in (YES, NO))
    if not yes + no > 0:
        return Verdict(None, "neither yes nor no is among the judge's likeliest tokens")
    share, curve = yes / (yes + no), parameters.curves.get(answer.model, parameters.curve)
    share = float(curve.at(np.array([share]))[0]) if curve is not None else share
    return Verdict(100 * share, 'P("yes") of the judge model')


def _probability(tokens: Sequence[tuple[str, float]], word: str) -> float:
    """Of all spellings of a word; a log-probability that is none counts as impossible."""
    usable = [logprob for token, logprob in tokens if token.strip().lower() == word and logprob <= 1e-6]
    return math.fsum(math.exp(min(value, 0.0)) for value in usable)
