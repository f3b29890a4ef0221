"""A request as numbers. Cheap: some 50 µs, no model of language.

What may look like magic here: numbers of a prompt often *are* the length ("from 3 to 90", "ten lines"), so their
magnitudes and differences are features; words are hashed into buckets, so that no vocabulary has to be kept; history
gives each template's own mean, which is most of the signal where applications send one prompt in many variants.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from millrace.contracts.tagger import TagRequest
from millrace.lengths.history import HISTORY_FEATURES, LengthHistory
from millrace.lengths.prompttext import WORD_BUCKETS, PromptText, read_prompt, word_bucket

#: Raise it with every change of what a feature means: models of another version are refused.
FEATURE_VERSION = 1
#: Numbers beyond this are not believed.
VALUE_MAX = 1e9

_STRUCTURED = {"": 0.0, "json_object": 1.0, "json_schema": 2.0, "regex": 3.0, "choice": 4.0, "grammar": 5.0}

_REQUEST = (
    "prompt_tokens",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "penalties",
    "n",
    "stops",
    "structured",
)
_TEXT = (
    "markers",
    "characters",
    "words",
    "lines",
    "digits",
    "question_marks",
    "commas",
    "colons",
    "quotes",
    "braces",
    "backticks",
    "word_length_mean",
    "word_length_max",
    "last_word_length",
    "first_word",
    "second_word",
)
_NUMBERS = ("numbers", "number_first", "number_last", "number_max", "number_sum", "number_span", "span_over_step")
FEATURES: tuple[str, ...] = (
    *_REQUEST,
    *_TEXT,
    *_NUMBERS,
    *HISTORY_FEATURES,
    *(f"word_{bucket}" for bucket in range(WORD_BUCKETS)),
)

#: Columns that baselines look at.
PROMPT_TOKENS = FEATURES.index("prompt_tokens")
MAX_TOKENS = FEATURES.index("max_tokens")


_HISTORY = [FEATURES.index(name) for name in HISTORY_FEATURES]
_NO_HISTORY = LengthHistory().read(TagRequest(request="", model="", prompt_tokens=0, max_tokens=0), read_prompt(""))


def without_history(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Copies of rows (rows, FEATURES) as they would be at a tagger's start, when nothing was learnt yet."""
    bare = rows.copy()
    bare[:, _HISTORY] = _NO_HISTORY
    return bare


def extract(request: TagRequest, text: PromptText, history: LengthHistory) -> list[float]:
    """Values of FEATURES, all finite.

    Args:
        history: As it stands before this request's outcome is known.
    """
    return [
        *_request_features(request),
        *_text_features(text),
        *_number_features(text.numbers),
        *history.read(request, text),
        *_word_counts(text.buckets),
    ]


def _request_features(request: TagRequest) -> list[float]:
    return [
        _sane(request.prompt_tokens / max(1, request.prompts)),
        _sane(request.max_tokens),
        _sane(request.min_tokens),
        _sane(request.temperature),
        _sane(request.top_p),
        _sane(request.penalties),
        _sane(request.n),
        _sane(request.stops),
        _STRUCTURED.get(request.structured, 6.0),
    ]


def _text_features(text: PromptText) -> list[float]:
    turn, words = text.turn, text.words
    lengths = [len(word) for word in words] or [0]
    return [
        float(text.markers),
        float(len(turn)),
        float(len(words)),
        float(turn.count("\n")),
        float(text.digits),
        float(turn.count("?")),
        float(turn.count(",")),
        float(turn.count(":")),
        float(turn.count('"') + turn.count("'")),
        float(turn.count("{") + turn.count("[")),
        float(turn.count("`")),
        sum(lengths) / len(lengths),
        float(max(lengths)),
        float(lengths[-1]),
        float(word_bucket(words[0], 256)) if words else -1.0,
        float(word_bucket(words[1], 256)) if len(words) > 1 else -1.0,
    ]


def _number_features(numbers: list[int]) -> list[float]:
    if not numbers:
        return [0.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0]
    span = abs(numbers[1] - numbers[0]) if len(numbers) > 1 else numbers[0]
    step = numbers[2] if len(numbers) > 2 and numbers[2] else 1
    return [
        float(len(numbers)),
        float(numbers[0]),
        float(numbers[-1]),
        float(max(numbers)),
        float(sum(numbers)),
        float(span),
        span / step,
    ]


def _word_counts(buckets: list[int]) -> list[float]:
    counts = [0.0] * WORD_BUCKETS
    for bucket in buckets:
        counts[bucket] += 1.0
    return counts


def _sane(value: float) -> float:
    """Trees want numbers: what is none counts as unknown."""
    return min(max(float(value), -VALUE_MAX), VALUE_MAX) if math.isfinite(value) else -1.0
