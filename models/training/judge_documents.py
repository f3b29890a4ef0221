"""Documents that millrace-judge is trained on: answers with their truth, as it reads them.

Without torch, which the training itself brings: the tests of documents need none of it.
"""

from typing import NamedTuple

from millrace.judging.question import after_answer, before_answer
from tokenizers import Tokenizer


class Answered(NamedTuple):
    """One answer: texts, whether it is right, and the right answer's text where there is only one."""

    prompt: str
    answer: str
    right: bool
    expected: str


class Judged(NamedTuple):
    """An answer as the judge reads it.

    Attributes:
        tokens: Of the question, up to where the judge speaks.
        so_far: By token: 1 where the answer is right up to it, 0 where not, -1 outside of the answer.
        right: What the judge is to say.
    """

    tokens: list[int]
    so_far: list[int]
    right: bool


def judged(tokenizer: Tokenizer, row: Answered) -> Judged:
    """The document of one answer: the chat that the judge's template makes of the question."""
    parts = (f"<|bos|><|user|>{before_answer(row.prompt)}", row.answer, f"{after_answer()}<|eos|><|assistant|>")
    head, answer, tail = (tokenizer.encode(part, add_special_tokens=False).ids for part in parts)
    expected = tokenizer.encode(row.expected, add_special_tokens=False).ids
    same = next((i for i, pair in enumerate(zip(answer, expected, strict=False)) if pair[0] != pair[1]), len(expected))
    so_far = [int(index < same) if row.expected else -1 for index in range(len(answer))]
    tokens = tokenizer.encode("".join(parts), add_special_tokens=False).ids
    if tokens != [*head, *answer, *tail]:  # the answer runs into the question's words: only the verdict is learnt
        return Judged(tokens, [-1] * len(tokens), row.right)
    return Judged(tokens, [-1] * len(head) + so_far + [-1] * len(tail), row.right)
