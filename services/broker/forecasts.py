"""The future of one instance, as its broker simulates it from the last snapshot. Pure.

Step times are those of the set that the instance names, stretched by what its steps really took. Without a set there is
no forecast: policies then compare loads.
"""

from __future__ import annotations

from millrace.contracts.broker import AskForMove, LoadCurve
from millrace.contracts.status import BatchComposition, InstanceRecord, StatusSnapshot
from millrace.enginemodel.forecast.forecaster import Forecaster
from millrace.enginemodel.forecast.question import Candidate, LeaveForecast, LoadForecast
from millrace.enginemodel.registered import scheduler_parameters
from millrace.enginemodel.step_cost import FS_PER_NS, StepCost
from millrace.enginemodel.step_time_models import StepTimeModel
from millrace.policies.trading import JoinView

#: Output length that is assumed where none was predicted.
REST_DEFAULT = 128

#: A factor beyond these says that the set is for another engine.
SCALE_MIN, SCALE_MAX = 0.2, 20.0

#: Share of a new step in the factor: the last hundred carry most of the weight.
SCALE_SHARE = 0.02

#: A smaller change of the factor is not told to the forecaster, which begins anew with each.
SCALE_STEP = 0.02


class InstanceForecasts:
    """Forecasts of one instance.

    Attributes:
        scale: Measured over modelled step time.
    """

    def __init__(self, record: InstanceRecord, step_time: StepTimeModel | None) -> None:
        """Raises ValueError where no engine could run with what the record says."""
        self.parameters = scheduler_parameters(record)
        self.scale = 1.0
        self._cost: StepCost | None = step_time.cost(self.parameters) if step_time is not None else None
        self._forecaster: Forecaster | None = None
        if self._cost is not None:
            self._forecaster = Forecaster(self._cost, self.parameters, default_output_tokens=REST_DEFAULT)
        self._told_scale = 1.0
        self._loaded: StatusSnapshot | None = None
        self._refused: StatusSnapshot | None = None

    def observe(self, snapshot: StatusSnapshot) -> None:
        batch = snapshot.batch
        if self._cost is None or snapshot.step_duration_ns <= 0 or batch.decodes + batch.prefills == 0:
            return
        modelled_ns = self._cost.duration_fs(batch) / FS_PER_NS
        ratio = min(SCALE_MAX, max(SCALE_MIN, snapshot.step_duration_ns / modelled_ns))
        self.scale += SCALE_SHARE * (ratio - self.scale)

    def _at(self, snapshot: StatusSnapshot, boundary: int | None, now_ns: int) -> Forecaster | None:
        """The forecaster at this moment; None without a step-time set, or where no engine can be in that state."""
        forecaster = self._forecaster
        if forecaster is None or snapshot is self._refused:
            return None
        if abs(self.scale / self._told_scale - 1) > SCALE_STEP:
            self._told_scale = self.scale
            forecaster.set_scale(self.scale)
        forecaster.set_leave_at(boundary or 0)
        if snapshot is not self._loaded:
            try:
                forecaster.load(snapshot)
            except ValueError:
                self._refused = snapshot
                return None
            self._loaded = snapshot
        forecaster.advance(now_ns)
        return forecaster

    def curve(
        self, snapshot: StatusSnapshot, boundary: int | None, now_ns: int, *, horizon_ns: int, points: int
    ) -> LoadForecast | None:
        """The load over a horizon if nobody else comes."""
        forecaster = self._at(snapshot, boundary, now_ns)
        return forecaster.curve(horizon_ns, points) if forecaster is not None else None

    def leave(self, snapshot: StatusSnapshot, boundary: int | None, now_ns: int, sequence: str) -> LeaveForecast | None:
        """Forecast what the other sequences gain if this one leaves."""
        forecaster = self._at(snapshot, boundary, now_ns)
        return forecaster.leave(sequence) if forecaster is not None else None

    def join(self, snapshot: StatusSnapshot, boundary: int | None, now_ns: int, ask: AskForMove) -> JoinView | None:
        """Forecast what the others lose if it comes with its KV; None without a forecast, or if it would be refused."""
        forecaster = self._at(snapshot, boundary, now_ns)
        candidate = _candidate(ask)
        if forecaster is None or candidate.refusal(self.parameters) is not None:
            return None
        joined = forecaster.join(candidate)
        return JoinView(
            others_delay_ns=joined.others_delay_ns,
            rest_ns=joined.e2e_ns,
            blocks_peak=joined.blocks_peak,
            preemptions=joined.preemptions,
        )

    def step_ns(self, batch: BatchComposition) -> int | None:
        """Time that a step with that batch takes here; None without a step-time set."""
        return round(self._cost.duration_fs(batch) / FS_PER_NS * self.scale) if self._cost is not None else None


def _candidate(ask: AskForMove) -> Candidate:
    rest = ask.rest_p50
    return Candidate(
        prompt_tokens=ask.prompt_tokens,
        output_tokens=ask.output_tokens,
        expected_output_tokens=ask.output_tokens + rest if rest is not None else None,
        max_tokens=ask.max_tokens,
    )


def told_curve(forecast: LoadForecast | None) -> LoadCurve | None:
    """The part of a forecast that goes to other brokers."""
    if forecast is None:
        return None
    return LoadCurve(
        step_ns=forecast.spacing_ns,
        tokens=list(forecast.tokens),
        blocks=list(forecast.blocks),
        running=list(forecast.running),
    )
