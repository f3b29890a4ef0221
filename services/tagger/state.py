"""A tagger's state of one served model, and the requests whose outcome it waits for."""

from __future__ import annotations

from collections import OrderedDict, deque

import msgspec
import numpy as np
from millrace.contracts.observers import RequestFinished
from millrace.contracts.tagger import TagRequest
from millrace.lengths.baselines import HistoryModel
from millrace.lengths.estimate import LengthEstimate, LengthModel, Row
from millrace.lengths.features import FEATURES, extract
from millrace.lengths.history import LengthHistory
from millrace.lengths.prompttext import read_prompt
from millrace.lengths.quantile import QuantileModel
from millrace.lengths.samples import CUT, LengthSample, pack, usable_lengths

#: Outcomes that a model is trained on, the newest ones. Some 700 bytes each.
SAMPLES_MAX = 8_192
#: Answered requests whose end is awaited; the oldest is forgotten first. Some 1 KB each.
PENDING_MAX = 16_384


class AnsweredTag(msgspec.Struct, frozen=True):
    """A request that was answered.

    Attributes:
        request: Without its prompt.
        row: Its features, packed.
        said: What was answered; None for unknown.
    """

    request: TagRequest
    row: bytes
    opening: int
    template: int
    said: LengthEstimate | None
    source: str


class ServedLengths:
    """Everything learnt about the outputs of one served model."""

    def __init__(self, model: QuantileModel | None) -> None:
        self.model = model
        self.history = LengthHistory()
        self.fallback = HistoryModel()
        self.samples: deque[LengthSample] = deque(maxlen=SAMPLES_MAX)
        self.unkept: list[LengthSample] = []
        self.since_training = 0
        self.trained_ns = 0
        self.training = False

    def answer(self, request: TagRequest) -> AnsweredTag:
        """Answer to a request: from the model, else history."""
        text = read_prompt(request.prompt)
        row = np.array(extract(request, text, self.history))
        said, source = self._say(row)
        if said is not None:
            said = said.within(request.min_tokens, request.max_tokens)
        bare = msgspec.structs.replace(request, prompt="")  # its features are kept instead: 2 KB less a request
        return AnsweredTag(bare, pack(row), text.opening, text.template, said, source)

    def _say(self, row: Row) -> tuple[LengthEstimate | None, str]:
        models: tuple[tuple[LengthModel | None, str], ...] = ((self.model, "model"), (self.fallback, "history"))
        for model, source in models:
            said = model.estimate(row) if model is not None else None
            if said is not None and said.finite():
                return said, source
        return None, "unknown"

    def learn(self, asked: AnsweredTag, finished: RequestFinished) -> LengthSample | None:
        """Takes an outcome; None where nothing can be learnt from it."""
        lengths, _ = usable_lengths(finished.output_tokens, finished.finish_reasons)
        if finished.outcome != "completed" or not lengths:
            return None
        reasons = finished.finish_reasons[: len(lengths)]
        sample = LengthSample(
            row=asked.row,
            lengths=lengths,
            cut=CUT in reasons,
            key=asked.request.key,
            opening=asked.opening,
            template=asked.template,
            at_ns=finished.arrival_ns + finished.e2e_ns,
        )
        self.take(sample)
        self.since_training += 1
        return sample

    def take_all(self, samples: list[LengthSample]) -> None:
        """Learns what was kept before a restart; samples of other features say nothing here."""
        size = 4 * len(FEATURES)
        for sample in samples:
            if len(sample.row) == size:
                self.take(sample)

    def take(self, sample: LengthSample) -> None:
        row = np.frombuffer(sample.row, "<f4").astype(np.float64)
        for length in sample.lengths:
            self.history.learn(key=sample.key, opening=sample.opening, template=sample.template, length=length)
            self.fallback.learn(row, length)
        self.samples.append(sample)


class PendingRequests:
    """Answered requests by id, bounded."""

    def __init__(self, size_max: int = PENDING_MAX) -> None:
        self._size_max = size_max
        self._asked: OrderedDict[str, AnsweredTag] = OrderedDict()

    def __len__(self) -> int:
        return len(self._asked)

    def add(self, asked: AnsweredTag) -> None:
        """Remembers one; asked twice, the later answer counts."""
        self._asked.pop(asked.request.request, None)
        if len(self._asked) >= self._size_max:
            self._asked.popitem(last=False)
        self._asked[asked.request.request] = asked

    def pop(self, request: str) -> AnsweredTag | None:
        """Takes one out; None where it was not asked here, or too long ago."""
        return self._asked.pop(request, None)
