"""Running means of real lengths: of a model, of each API key, of each task and each template. Bounded."""

from __future__ import annotations

from collections import OrderedDict

from millrace.contracts.tagger import TagRequest
from millrace.lengths.prompttext import PromptText

#: Keys, tasks and templates kept each; the one seen longest ago goes first. About 200 bytes an entry.
ENTRIES_MAX = 4_096
#: Weight of the newest outcome once there are many: the mean forgets with a half-life of about 35 outcomes.
WEIGHT_MIN = 0.02

#: What ``LengthHistory.read`` returns, in order; lengths in tokens, -1 where nothing is known.
HISTORY_FEATURES = (
    "model_mean",
    "key_mean",
    "key_count",
    "opening_mean",
    "opening_last",
    "opening_count",
    "template_mean",
    "template_last",
    "template_count",
)


class RunningMean:
    """Mean that forgets, with the last value and the count."""

    __slots__ = ("count", "last", "mean")

    def __init__(self) -> None:
        self.mean = 0.0
        self.last = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.mean += (value - self.mean) * max(WEIGHT_MIN, 1.0 / self.count)
        self.last = value


class RunningMeans:
    """Running means by key, least recently used out first."""

    def __init__(self, entries_max: int = ENTRIES_MAX) -> None:
        self._entries_max = entries_max
        self._means: OrderedDict[str | int, RunningMean] = OrderedDict()

    def __len__(self) -> int:
        return len(self._means)

    def get(self, key: str | int) -> RunningMean | None:
        return self._means.get(key)

    def add(self, key: str | int, value: float) -> None:
        mean = self._means.get(key)
        if mean is None:
            if len(self._means) >= self._entries_max:
                self._means.popitem(last=False)
            mean = self._means[key] = RunningMean()
        else:
            self._means.move_to_end(key)
        mean.add(value)


class LengthHistory:
    """Everything that outcomes taught about one served model, as features of the next request."""

    def __init__(self) -> None:
        self._model = RunningMean()
        self._keys = RunningMeans()
        self._openings = RunningMeans()
        self._templates = RunningMeans()

    @property
    def outcomes(self) -> int:
        return self._model.count

    def read(self, request: TagRequest, text: PromptText) -> list[float]:
        """Values of HISTORY_FEATURES for a request."""
        key = self._keys.get(request.key)
        opening, template = self._openings.get(text.opening), self._templates.get(text.template)
        return [
            self._model.mean if self._model.count else -1.0,
            *((key.mean, float(key.count)) if key is not None else (-1.0, 0.0)),
            *((opening.mean, opening.last, float(opening.count)) if opening is not None else (-1.0, -1.0, 0.0)),
            *((template.mean, template.last, float(template.count)) if template is not None else (-1.0, -1.0, 0.0)),
        ]

    def learn(self, *, key: str, opening: int, template: int, length: float) -> None:
        self._model.add(length)
        self._keys.add(key, length)
        self._openings.add(opening, length)
        self._templates.add(template, length)
