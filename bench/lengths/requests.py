"""Recorded requests of one model, as bench/lengths/record.py writes them, and the outcomes that they were."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np
from millrace.contracts.tagger import TagRequest
from millrace.lengths.features import extract
from millrace.lengths.history import LengthHistory
from millrace.lengths.prompttext import read_prompt
from millrace.lengths.samples import LengthSample, pack, usable_lengths


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


def read_requests(path: Path) -> list[LengthRecord]:
    """One JSON object a line, in the order in which requests were drawn."""
    decoder = msgspec.json.Decoder(LengthRecord)
    with gzip.open(path) as lines:
        return [decoder.decode(line) for line in lines if line.strip()]


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
