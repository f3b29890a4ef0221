"""Training samples: a request's features with the length that its answer had."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from millrace.contracts.tagger import TagRequest
from millrace.lengths.estimate import LENGTH_MAX
from millrace.lengths.features import FEATURES, extract
from millrace.lengths.history import LengthHistory
from millrace.lengths.prompttext import read_prompt

#: Choices of one request that count: many choices of one prompt must not drown the others.
CHOICES_MAX = 4
#: How an output may end for its length to be learnt.
ENDED, CUT = "stop", "length"


class LengthSample(msgspec.Struct, frozen=True, array_like=True):
    """One outcome.

    Attributes:
        row: Features as they were when the request came, little-endian float32.
        lengths: Real output lengths, tokens: one per choice, at most CHOICES_MAX.
        cut: Whether ``max_tokens`` ended any of them.
        key, opening, template: What history needs to learn from it again after a restart.
        at_ns: When it ended, unix ns; 0 where unknown.
    """

    row: bytes
    lengths: list[int]
    cut: bool
    key: str
    opening: int
    template: int
    at_ns: int = 0


class LengthRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A request as people record it: one JSON object a line. Field meanings are TagRequest's.

    Attributes:
        output_tokens: Real lengths, one per choice.
        finish_reasons: ``stop`` or ``length``, one per choice; empty means all ended by themselves.
    """

    prompt_tokens: int
    output_tokens: list[int]
    prompt: str = ""
    max_tokens: int = 1_000_000
    temperature: float = 1.0
    key: str = ""
    n: int = 1
    min_tokens: int = 0
    top_p: float = 1.0
    penalties: float = 0.0
    stops: int = 0
    structured: str = ""
    finish_reasons: list[str] = []

    def asked(self, model: str, request: str) -> TagRequest:
        """The question that a tagger would have got."""
        names = (name for name in self.__struct_fields__ if name not in ("output_tokens", "finish_reasons"))
        return TagRequest(request=request, model=model, **{name: getattr(self, name) for name in names})


def usable_lengths(lengths: Iterable[int], reasons: Sequence[str]) -> tuple[list[int], bool]:
    """Lengths that can be learnt from, and whether one was cut; none where any choice ended otherwise or absurdly."""
    kept = list(lengths)[:CHOICES_MAX]
    ended = list(reasons)[:CHOICES_MAX] or [ENDED] * len(kept)
    if not all(0 < length <= LENGTH_MAX for length in kept) or not set(ended) <= {ENDED, CUT}:
        return [], False
    return kept, CUT in ended


def pack(row: NDArray[np.float64]) -> bytes:
    """A row as a sample keeps it."""
    return row.astype("<f4").tobytes()


def matrix(samples: Sequence[LengthSample]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Features (choices, FEATURES) and lengths (choices) of samples, in order; those of other features are left out."""
    size = 4 * len(FEATURES)
    fitting = [sample for sample in samples if len(sample.row) == size]
    if not fitting:
        return np.empty((0, len(FEATURES))), np.empty(0)
    rows = np.frombuffer(b"".join(sample.row for sample in fitting), "<f4").reshape(-1, len(FEATURES))
    counts = [len(sample.lengths) for sample in fitting]
    lengths = np.array([length for sample in fitting for length in sample.lengths], np.float64)
    return np.repeat(rows.astype(np.float64), counts, axis=0), lengths


def samples_of(recorded: Iterable[LengthRecord]) -> Iterator[LengthSample]:
    """Samples in the order of the recording, each with the history that a tagger would have had by then."""
    history = LengthHistory()
    for number, one in enumerate(recorded):
        request = one.asked("", str(number))
        text = read_prompt(request.prompt)
        row = np.array(extract(request, text, history))
        lengths, cut = usable_lengths(one.output_tokens, one.finish_reasons)
        if not lengths:
            continue
        for length in lengths:
            history.learn(key=request.key, opening=text.opening, template=text.template, length=length)
        yield LengthSample(pack(row), lengths, cut, one.key, text.opening, text.template)
