"""Length models that need no training: AIBrix's histogram, and history per template."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import accumulate

from millrace.lengths.estimate import LengthEstimate, Row
from millrace.lengths.features import FEATURES, PROMPT_TOKENS

#: Buckets by powers of two: 2^0 up to 2^23.
BUCKETS = 24
#: Outcomes that a histogram remembers.
WINDOW = 4_096
#: So many outcomes of a template, or of a task, say more than the prompt's length does.
TEMPLATE_OUTCOMES = 3

_MODEL_MEAN = FEATURES.index("model_mean")
_TEMPLATE = (FEATURES.index("template_mean"), FEATURES.index("template_count"))
_OPENING = (FEATURES.index("opening_mean"), FEATURES.index("opening_count"))


class HistoryHistogram:
    """Counts of (prompt-length bucket, output-length bucket), both by powers of two.

    Source: AIBrix's gateway, histogram token predictor; differs in that mean and quantiles are interpolated inside a
    bucket, where AIBrix draws a bucket at random, and in a window of outcomes instead of one of time.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._outcomes: deque[tuple[int, int]] = deque()
        self._counts = [[0] * BUCKETS for _ in range(BUCKETS)]

    def learn(self, row: Row, length: int) -> None:
        place = (_bucket(row[PROMPT_TOKENS]), _bucket(length))
        self._outcomes.append(place)
        self._counts[place[0]][place[1]] += 1
        if len(self._outcomes) > self._window:
            prompt, output = self._outcomes.popleft()
            self._counts[prompt][output] -= 1

    def estimate(self, row: Row) -> LengthEstimate | None:
        """From the prompt's bucket, or all buckets together where nothing like it was seen."""
        if not self._outcomes:
            return None
        counts = self._counts[_bucket(row[PROMPT_TOKENS])]
        if not any(counts):
            counts = [sum(column) for column in zip(*self._counts, strict=True)]
        return _of_counts(counts)


class HistoryModel:
    """The histogram, scaled by how much longer than all others outputs of the request's template (or task) are.

    It answers until a model has been trained, and where none can be read.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._histogram = HistoryHistogram(window)

    def learn(self, row: Row, length: int) -> None:
        self._histogram.learn(row, length)

    def estimate(self, row: Row) -> LengthEstimate | None:
        said = self._histogram.estimate(row)
        if said is None:
            return None
        for mean, count in (_TEMPLATE, _OPENING):
            if row[count] >= TEMPLATE_OUTCOMES and row[_MODEL_MEAN] > 0:
                scale = float(row[mean] / row[_MODEL_MEAN])
                return LengthEstimate(said.mean * scale, said.p50 * scale, said.p90 * scale)
        return said


def _bucket(value: float) -> int:
    return min(BUCKETS - 1, max(1, int(value)).bit_length() - 1)


def _of_counts(counts: list[int]) -> LengthEstimate:
    total = sum(counts)
    mean = sum(count * 1.5 * (1 << bucket) for bucket, count in enumerate(counts)) / total
    running = list(accumulate(counts))
    return LengthEstimate(mean, _within_bucket(counts, running, 0.5), _within_bucket(counts, running, 0.9))


def _within_bucket(counts: list[int], running: list[int], share: float) -> float:
    wanted = share * running[-1]
    bucket = bisect_left(running, wanted)
    inside = (wanted - (running[bucket] - counts[bucket])) / counts[bucket]
    return (1 << bucket) * (1.0 + inside)
