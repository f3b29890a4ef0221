"""Reads a rendered prompt cheaply: its last turn's words, numbers and structure, and the template it was made from."""

from __future__ import annotations

import re
import zlib
from functools import lru_cache

import msgspec

#: Role markers of chat templates: ``<|user|>``, ``<|eot_id|>``, ``[INST]``, ``</s>``, ``<start_of_turn>``.
_MARKER = re.compile(r"<\|[^|<>]{1,40}\|>|\[/?INST\]|</?s>|<(?:start|end)_of_turn>")
_ROLES = ("assistant", "user", "system", "model", "tool", "developer")
_DIGITS = re.compile(r"[0-9]+")
#: Blanks out every byte that is no digit: a third of the time that the pattern takes on a long prompt.
_NO_DIGITS_BLANK = bytes(byte if byte in b"0123456789" else ord(" ") for byte in range(256))

#: So many words of the last turn are looked at: time per request stays bounded.
WORDS_MAX = 64
#: Buckets of hashed words.
WORD_BUCKETS = 40
#: A number of more digits is an identifier, not a quantity.
DIGITS_MAX = 7
#: A longer word is data (base64, an URL, letters to copy) and says nothing about the task.
WORD_LENGTH_MAX = 14
#: Words that name the task, mostly: "write a story", "count down from".
OPENING_WORDS = 3


class PromptText(msgspec.Struct, frozen=True):
    """Properties of a prompt's text from which features are computed.

    Attributes:
        turn: The last turn that has text, as far as the head of the prompt shows it.
        words: Its first words, lower case.
        buckets: Hash bucket of each of them.
        numbers: Whole numbers among its text, in order.
        markers: Role markers in the head.
        opening: Hash of the first words: the task, coarsely.
        template: Hash of the turn with digits and data masked: the template, finely.
    """

    turn: str
    words: list[str]
    buckets: list[int]
    numbers: list[int]
    digits: int
    markers: int
    opening: int
    template: int


def read_prompt(head: str) -> PromptText:
    """Reads the head of a rendered prompt. Any text is legal."""
    pieces = _MARKER.split(head)
    turn = next((text for piece in reversed(pieces) if (text := piece.strip()) and text.lower() not in _ROLES), "")
    words = turn.lower().split(None, WORDS_MAX)[:WORDS_MAX]
    digits = turn.encode("utf-8", "surrogatepass").translate(_NO_DIGITS_BLANK).split()
    facts = [_facts(word) for word in words]
    masked = [mask for mask, _ in facts]
    return PromptText(
        turn=turn,
        words=words,
        buckets=[bucket for _, bucket in facts],
        numbers=[int(text) for text in digits[:WORDS_MAX] if len(text) <= DIGITS_MAX],
        digits=sum(map(len, digits)),
        markers=len(pieces) - 1,
        opening=_hash(" ".join(masked[:OPENING_WORDS])),
        template=_hash(" ".join(masked)),
    )


@lru_cache(maxsize=8_192)
def _facts(word: str) -> tuple[str, int]:
    """Mask and bucket of a word. Most words come again and again; remembering them halves the time of a long prompt."""
    return _masked(word), word_bucket(word, WORD_BUCKETS)


def word_bucket(word: str, buckets: int) -> int:
    """Stable bucket of a word: the same in every process and version."""
    return zlib.crc32(word.encode("utf-8", "surrogatepass")) % buckets


def _masked(word: str) -> str:
    if len(word) > WORD_LENGTH_MAX:
        return "_"
    return word if word.isalpha() else _DIGITS.sub("#", word)


def _hash(text: str) -> int:
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))
