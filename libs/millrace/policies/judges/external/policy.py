"""External: a model is asked for a number from 0 to 100."""

from __future__ import annotations

import math
import re
from typing import Any

from millrace.policies.judges.verdict import Judged, Verdict, first_choice
from millrace.policies.registry import Nothing

#: Tokens that the judge may answer: a number, and a little more from models that cannot stop.
TOKENS_MAX = 8

_NUMBER = re.compile(r"\s*(-?\d+(?:\.\d+)?)\s*(?:/\s*100)?\s*[.%]?\s*")

INSTRUCTION = (
    "You grade answers of a language model. Say how good the answer to the request is as one whole number from 0 "
    "(wrong or useless) to 100 (right and complete). Answer with the number alone."
)


def question(answer: Judged, parameters: Nothing) -> dict[str, Any]:
    """Asks for the grade of one choice."""
    asked = f"Request:\n{answer.prompt}\n\nAnswer:\n{answer.text}\n\nGrade from 0 to 100:"
    messages = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": asked}]
    return {"messages": messages, "max_tokens": TOKENS_MAX, "temperature": 0}


def verdict(payload: bytes, answer: Judged, parameters: Nothing) -> Verdict:
    """The grade in a response; none where it is anything but one number from 0 to 100."""
    choice = first_choice(payload)
    if choice is None:
        return Verdict(None, "the judge's answer is no chat completion")
    text = choice.message.content or ""
    if not text.strip():
        return Verdict(None, "the judge answered nothing")
    found = _NUMBER.fullmatch(text)
    value = float(found.group(1)) if found else math.nan
    if math.isnan(value):
        return Verdict(None, f"the judge answered text, not a number: {text.strip()[:80]!r}")
    if not 0 <= value <= 100:
        return Verdict(None, f"the judge answered {value:g}, which is not within 0 to 100")
    return Verdict(value, "graded by the external judge")
