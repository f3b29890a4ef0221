"""The LLM judge: a model is asked whether the answer is right, and the score is 100 · P("yes").

A model of this cluster is asked by ingress, as a child call of the request, and what it says comes with the question
(``judge_opinions``). A model elsewhere is asked here, through an OpenAI-compatible API (``llm_body``, ``llm_verdict``).
`millrace-judge` ships and was trained on this question; any other served model may be named, and its answers are only
as good as that model is. `curve` calibrates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from millrace.contracts.judge import JudgeAnswer
from millrace.judging.calibration import IsotonicCurve
from millrace.judging.question import NO, YES, judging_question

from services.judge.kinds.external import first_choice
from services.judge.kinds.verdict import Verdict

#: First tokens looked at; ingress gives at most 20.
TOP_TOKENS = 20


class _TopToken(msgspec.Struct):
    token: str
    logprob: float


class _TokenLogprobs(msgspec.Struct):
    top_logprobs: list[_TopToken]


class _Logprobs(msgspec.Struct):
    content: list[_TokenLogprobs]


def llm_body(question: JudgeAnswer, answer: str, *, model: str) -> dict[str, Any]:
    """The body of ``POST /chat/completions`` that asks for one token."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": judging_question(question.prompt, answer)}],
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": TOP_TOKENS,
    }


def llm_verdict(payload: bytes, curve: IsotonicCurve | None) -> Verdict:
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
    return _verdict([(each.token, each.logprob) for each in told.content[0].top_logprobs], curve)


def judge_opinions(question: JudgeAnswer, curve: IsotonicCurve | None) -> Verdict:
    """The least score of all choices, by what the judging model said of each; none where it did not say of one."""
    if len(question.opinions) < len(question.answer):
        return Verdict(None, "the judge model did not say of each choice")
    verdicts = [_verdict(tokens, curve) for tokens in question.opinions]
    mute = next((verdict for verdict in verdicts if verdict.score is None), None)
    return mute or min(verdicts, key=lambda verdict: verdict.score or 0.0)


def _verdict(tokens: Sequence[tuple[str, float]], curve: IsotonicCurve | None) -> Verdict:
    """Of the likeliest first tokens with their log-probabilities."""
    yes, no = (_probability(tokens, word) for word in (YES, NO))
    if not yes + no > 0:
        return Verdict(None, "neither yes nor no is among the judge's likeliest tokens")
    share = yes / (yes + no)
    share = float(curve.at(np.array([share]))[0]) if curve is not None else share
    return Verdict(100 * share, 'P("yes") of the judge model')


def _probability(tokens: Sequence[tuple[str, float]], word: str) -> float:
    """Of all spellings of a word; a log-probability that is none counts as impossible."""
    usable = [logprob for token, logprob in tokens if token.strip().lower() == word and logprob <= 1e-6]
    return math.fsum(math.exp(min(value, 0.0)) for value in usable)
