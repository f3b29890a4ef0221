"""Question about an answer that a language model judges. Training a judge and asking it use the same text."""

from __future__ import annotations

QUESTION = "Is the answer to the request right? Answer yes or no."

#: Words of its answer; a judge is as sure as the first one's share of both.
YES, NO = "yes", "no"


def before_answer(prompt: str) -> str:
    """The text up to the answer. ``prompt`` is the rendered prompt of the model that answered."""
    return f"Request:\n{prompt}\n\nAnswer:\n"


def after_answer() -> str:
    """The text after the answer."""
    return f"\n\n{QUESTION}"


def judging_question(prompt: str, answer: str) -> str:
    """The question to the judge, as one message of a user."""
    return f"{before_answer(prompt)}{answer}{after_answer()}"
