"""Step times against what the engine really took: a scale on a known set, or a set of its own where none is known.

Both learn from snapshots alone. A snapshot tells the duration and the batch of its last step; two snapshots between
which the same sequences only decoded tell besides how long a whole run took, pauses between steps included, which is
what a forecast adds up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping

import msgspec
import numpy as np
from millrace.contracts.status import BatchComposition, InstanceRecord, StatusSnapshot
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_cost import FS_PER_NS, StepCost, after
from millrace.enginemodel.step_time_models import LinearStepTime, StepTimeModel

#: A scale beyond these says that the set is for another engine; more would only hide it. An engine that shares its core
#: with a dozen others was seen to take ten times as long.
SCALE_MIN, SCALE_MAX = 0.2, 20.0

#: One step counts for at most so many times its scaled prediction: a page fault or a stopped process is no step time.
OUTLIER_RATIO = 4.0

#: Share that is forgotten with each observation: the last hundred carry most of the weight.
FORGET = 0.01

#: Observations that the set itself is worth at the start: the first step does not turn it over.
PRIOR_STEPS = 5

#: So many observations of its own weigh as much as what its kin have shown.
KIN_STEPS = 10

#: Most that its own observations count for against that; the scale itself remembers no more.
OWN_STEPS_MAX = 100

#: An instance that shows nothing is judged by its kin again: after GRACE its own observations lose half their weight
#: in each HALF_LIFE. What made it slow may be long gone, and nobody is sent to it who could show that.
GRACE_NS, HALF_LIFE_NS = 1_000_000_000, 2_000_000_000

#: Kinds of instances that are remembered; each further instance is a kind of its own.
KINS_MAX = 256

#: Stands for any number of blocks that holds one sequence.
BLOCKS_ANY = 1 << 40

#: Longest run of decode steps between two snapshots that is taken as one observation.
RUN_STEPS_MAX = 256

#: Steps seen before a fit is believed, and those among them that had a prompt chunk: without, prompts would seem free.
FIT_STEPS_MIN, FIT_PREFILLS_MIN = 50, 5

#: Steps that a fit looks back on, and new ones until the next fit (2 ms each).
FIT_STEPS_MAX, REFIT_STEPS = 512, 64

#: A step that is this many times off the first fit is left out of the second.
FIT_OUTLIER_RATIO = 3.0


class StepScale:
    """Measured over predicted step time, as a ratio of two sums that forget: ``value``, within its bounds."""

    def __init__(self) -> None:
        self.steps = 0.0
        self.value = 1.0
        self._measured = 0.0
        self._predicted = 0.0

    def observe(self, measured_ns: float, predicted_ns: float, steps: int = 1) -> None:
        """Takes one step, or a run of ``steps``, into account."""
        if measured_ns <= 0 or predicted_ns <= 0:
            return
        if not self._predicted:
            self._measured = self._predicted = PRIOR_STEPS * predicted_ns / steps
        expected = self.value * predicted_ns
        measured_ns = min(max(measured_ns, expected / OUTLIER_RATIO), expected * OUTLIER_RATIO)
        keep = (1 - FORGET) ** min(steps, 20)
        self._measured = keep * self._measured + measured_ns
        self._predicted = keep * self._predicted + predicted_ns
        self.steps += 1
        self._divide()

    def fade(self, share: float) -> None:
        """Keeps the value and ``share`` of its weight: what comes next turns it over sooner."""
        self.steps *= share
        self._measured *= share
        self._predicted *= share
        self._divide()

    def _divide(self) -> None:
        ratio = self._measured / self._predicted if self._predicted else 1.0
        self.value = min(SCALE_MAX, max(SCALE_MIN, ratio))


class StepFit:
    """Fits a linear set to the last steps of one engine, by non-negative least squares on relative errors."""

    def __init__(self) -> None:
        self._rows: deque[tuple[float, ...]] = deque(maxlen=FIT_STEPS_MAX)
        self._until_fit = FIT_STEPS_MIN
        _solver()  # its import takes half a second: now, not at the first fit

    def observe(self, batch: BatchComposition, duration_ns: int) -> LinearStepTime | None:
        """Takes a step; returns a new fit where one is due."""
        self._rows.append((1.0, *_features(batch), float(duration_ns)))
        self._until_fit -= 1
        if self._until_fit > 0 or sum(row[2] > 0 for row in self._rows) < FIT_PREFILLS_MIN:
            return None
        self._until_fit = REFIT_STEPS
        return fit(np.array(self._rows))


class Kin:
    """State shared by instances of one kind: same model, engine, limits and step-time set.

    An instance that got no request yet is judged by its kin. Otherwise, with a wrong set, it would look slower than
    those that have shown their pace, and would never get a request.

    Attributes:
        cost: The known or fitted set; None while there is neither.
        scale: Factor on it, over all of them.
        fits: How often ``cost`` was fitted anew.
    """

    def __init__(self, cost: StepCost | None, parameters: EngineParameters) -> None:
        self.cost = cost
        self.scale = StepScale()
        self.fits = 0
        self._parameters = parameters
        self._fit = StepFit() if cost is None else None

    def observe(self, batch: BatchComposition, duration_ns: int) -> None:
        """Takes a step into the fit, where there is to be one."""
        fitted = self._fit.observe(batch, duration_ns) if self._fit is not None else None
        if fitted is not None:
            self.cost, self.fits = fitted.cost(self._parameters), self.fits + 1


class Kins:
    """Finds the kin of an instance; makes it where it is the first of its kind."""

    def __init__(self, step_times: Mapping[str, StepTimeModel]) -> None:
        self._step_times = step_times
        self._kins: dict[Hashable, Kin] = {}

    def knows(self, step_time: str) -> bool:
        return step_time in self._step_times

    def of(self, record: InstanceRecord, parameters: EngineParameters) -> Kin:
        """Those of its kind. Engines of one kind differ by some blocks where they measured their memory."""
        limits = msgspec.structs.replace(parameters, blocks_total=BLOCKS_ANY)
        key = (record.model, record.engine, record.engine_version, record.step_time, limits)
        kin = self._kins.get(key)
        if kin is None:
            model = self._step_times.get(record.step_time)
            kin = Kin(model.cost(parameters) if model is not None else None, parameters)
            if len(self._kins) < KINS_MAX:
                self._kins[key] = kin
        return kin


class Calibration:
    """Known cost of one instance's steps."""

    def __init__(self, kin: Kin, *, enabled: bool = True) -> None:
        self.kin = kin
        self._own = StepScale()
        self._shown_ns = 0
        self._enabled = enabled

    def scale(self, now_ns: int) -> float:
        """Factor on the cost: its own, and its kin's where it has shown little, or nothing for a while."""
        scale = self._own
        own = scale.steps if scale.steps < OWN_STEPS_MAX else OWN_STEPS_MAX
        if now_ns - self._shown_ns > GRACE_NS:
            own *= self._kept(now_ns)
        return (own * scale.value + KIN_STEPS * self.kin.scale.value) / (own + KIN_STEPS)

    def _kept(self, now_ns: int) -> float:
        """Share of the weight of what it has shown that is left."""
        rest_ns = now_ns - self._shown_ns - GRACE_NS
        return float(0.5 ** (rest_ns / HALF_LIFE_NS)) if rest_ns > 0 else 1.0

    def observe(self, snapshot: StatusSnapshot, before: StatusSnapshot | None) -> None:
        """Learns from a snapshot with a new step and the one before it."""
        if not self._enabled or snapshot.step_duration_ns <= 0 or not _computed(snapshot.batch):
            return
        self.kin.observe(snapshot.batch, snapshot.step_duration_ns)
        cost = self.kin.cost
        if cost is None:
            return
        steps = run_of_decodes(before, snapshot)
        if before is not None and steps:
            measured_ns, predicted_ns = snapshot.at_ns - before.at_ns, run_ns(cost, snapshot.batch, steps)
        else:
            measured_ns, predicted_ns = snapshot.step_duration_ns, cost.duration_fs(snapshot.batch) / FS_PER_NS
        kept = self._kept(snapshot.at_ns)
        if kept < 1:
            self._own.fade(kept)
        self._shown_ns = max(self._shown_ns, snapshot.at_ns)
        for scale in (self._own, self.kin.scale):
            scale.observe(measured_ns, predicted_ns, max(1, steps))


def run_of_decodes(before: StatusSnapshot | None, later: StatusSnapshot) -> int:
    """Steps between two snapshots in which the same sequences, and nothing else, decoded; 0 where that is not sure.

    New sequences join at the end of the running list, so that its length, its first and its last tell all.
    """
    if before is None or not before.running or before.waiting or later.waiting or later.batch.prefills:
        return 0
    steps, sequences = later.step - before.step, len(before.running)
    same = sequences == len(later.running) == later.batch.decodes and before.preemptions == later.preemptions
    if not same or not 0 < steps <= RUN_STEPS_MAX or before.running[0].sequence != later.running[0].sequence:
        return 0
    first, last = before.running[-1], later.running[-1]
    decoded = first.sequence == last.sequence and last.output_tokens - first.output_tokens == steps
    return steps if decoded and first.computed_tokens >= first.prompt_tokens else 0


def run_ns(cost: StepCost, last: BatchComposition, steps: int) -> float:
    """Cost of the ``steps`` decode steps of which ``last`` was the last, by the mean of the ends."""
    first = after(last, 1 - steps)
    return steps * (cost.duration_fs(first) + cost.duration_fs(last)) / 2 / FS_PER_NS


def fit(rows: np.ndarray) -> LinearStepTime:
    """Least squares over rows of (1, decodes, prefill tokens, context, prefill work, any prompt, duration in ns).

    Each row is weighted so that relative errors count. Steps far off the first fit are left out of the second.
    """
    coefficients = _solve(rows)
    predicted = np.maximum(rows[:, :-1] @ coefficients, 1.0)
    ratio = rows[:, -1] / predicted
    usual = (ratio < FIT_OUTLIER_RATIO) & (ratio > 1 / FIT_OUTLIER_RATIO)
    if usual.sum() >= FIT_STEPS_MIN // 2 and not usual.all():
        coefficients = _solve(rows[usual])
    return LinearStepTime.fitted(coefficients)


def _solver() -> Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, float]]:
    """Non-negative least squares. Imported only where there is something to fit, as known sets need none."""
    from scipy.optimize import nnls

    return nnls  # type: ignore[no-any-return]


def _solve(rows: np.ndarray) -> np.ndarray:
    weighted = rows[:, :-1] / rows[:, -1:]
    norms = np.linalg.norm(weighted, axis=0)
    norms[norms == 0] = 1.0  # a feature that never occurred costs nothing
    solution: np.ndarray = _solver()(weighted / norms, np.ones(len(rows)))[0]
    return np.asarray(solution / norms)


def _features(batch: BatchComposition) -> tuple[float, ...]:
    prompted = 1.0 if batch.prefill_tokens else 0.0
    return (
        float(batch.decodes),
        float(batch.prefill_tokens),
        float(batch.context_tokens),
        batch.prefill_work,
        prompted,
    )


def _computed(batch: BatchComposition) -> bool:
    return batch.decodes + batch.prefills > 0
