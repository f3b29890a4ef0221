"""From a question to an answer: what speaks against one, the state rolled forward to now, the forecast."""

from __future__ import annotations

from math import inf

from millrace.contracts.predictor import (
    LatencyPrediction,
    NoPrediction,
    NoPredictionReason,
    PredictLatency,
)
from millrace.enginemodel.forecast.forecaster import Forecaster
from millrace.enginemodel.forecast.question import Candidate
from millrace.membership.member import MemberState

from services.predictor.metrics import PredictorMetrics
from services.predictor.outcomes import OutcomeStatistics
from services.predictor.state import LENGTH_MAX, Instance, plausible

#: A busy engine that ends no step for so long hangs: rolling it forward would invent progress. The longest step of
#: what runs here, a full prompt chunk on one core, takes about a second.
STUCK_NS_MAX = 10_000_000_000

#: A scale that differs by less from the one in use is not worth compiling the costs anew.
SCALE_STEP = 0.002

#: Choices placed together; ingress allows 128.
SEQUENCES_MAX = 1_024


def fault(body: PredictLatency) -> str:
    """Fault of a question; empty where there is none."""
    prompt, output, bound = body.prompt_tokens, body.output_tokens, body.max_tokens
    if 0 < prompt < LENGTH_MAX and 0 <= output < LENGTH_MAX > bound > 0 < body.sequences <= SEQUENCES_MAX:
        return ""
    for name, least in (("prompt_tokens", 1), ("max_tokens", 1), ("sequences", 1), ("output_tokens", 0)):
        if not least <= getattr(body, name) < LENGTH_MAX:
            return f"{name} must be at least {least} and below {LENGTH_MAX}, is {getattr(body, name)}"
    return f"sequences must be at most {SEQUENCES_MAX}"


def candidate(
    prompt: int,
    output: int,
    bound: int,
    *,
    expected: float | None,
    default: int,
    sequences: int = 1,
    cached: int = 0,
) -> Candidate:
    """The request as a forecast takes it. Lengths in tokens; ``default`` where nothing sensible was predicted."""
    wanted = round(expected) if expected is not None and 0 < expected < inf else default
    return Candidate(
        prompt_tokens=prompt,
        output_tokens=output,
        expected_output_tokens=bound if wanted > bound else wanted or 1,
        max_tokens=bound,
        sequences=sequences,
        cached_tokens=cached,
    )


class Answers:
    """Forecasts instances on request. Changes an instance's rolled state, nothing else."""

    def __init__(self, metrics: PredictorMetrics, *, transit_ns: int) -> None:
        self._metrics = metrics
        self._transit_ns = transit_ns
        self._last: tuple[PredictLatency, int, Candidate] | None = None

    def answer(
        self, body: PredictLatency, instance: Instance, statistics: OutcomeStatistics, now_ns: int
    ) -> LatencyPrediction | NoPrediction:
        """Forecast for the request if the instance took it now, or the reason why there is none."""
        asked = self._candidate(body, instance, statistics)
        obstacle = self._obstacle(body, instance, asked, now_ns)
        if obstacle is not None:
            reason, detail = obstacle
            return NoPrediction(request=body.request, instance=instance.record.instance, reason=reason, detail=detail)
        scale = instance.calibration.scale(now_ns)  # an idle instance's changes with what its kin show
        if abs(scale / instance.scale - 1) > SCALE_STEP:
            instance.scale, instance.rolled = scale, None
        forecaster = self._rolled(instance, statistics, now_ns + self._transit_ns)
        transit_ns = self._transit_ns
        ttft, e2e, tpot_mean, tpot_worst, blocks, preemptions, others, delay, output = forecaster.figures(asked)
        corrected = statistics.correction.of(ttft + transit_ns, e2e + transit_ns, tpot_mean, tpot_worst)
        ttft, e2e, tpot_mean, tpot_worst = corrected
        return LatencyPrediction(
            request=body.request,
            instance=instance.record.instance,
            incarnation=instance.record.incarnation,
            ttft_ns=ttft,
            e2e_ns=e2e,
            tpot_mean_ns=tpot_mean,
            tpot_worst_ns=tpot_worst,
            blocks_peak=blocks,
            preemptions=preemptions,
            others=others,
            others_delay_ns=delay,
            output_tokens=output,
            snapshot_age_ns=instance.age_ns(now_ns),
            cached_tokens=asked.cached_tokens,
        )

    def _candidate(self, body: PredictLatency, instance: Instance, statistics: OutcomeStatistics) -> Candidate:
        """The request with what this instance has cached of its prompt; often the same for all that are asked about."""
        prefixes, cached = instance.prefixes, 0
        if body.block_hashes:
            if instance.snapshot is not None:
                prefixes.see(instance.snapshot)
            tokens = body.prompt_tokens + body.output_tokens
            cached = prefixes.cached_tokens(body.block_hashes, body.block_size, tokens)
        default = statistics.default_output_tokens
        last = self._last
        if last is not None and last[0] is body and last[1] == default and last[2].cached_tokens == cached:
            return last[2]
        asked = candidate(
            body.prompt_tokens,
            body.output_tokens,
            body.max_tokens,
            expected=body.expected_output_tokens,
            default=default,
            sequences=body.sequences,
            cached=cached,
        )
        self._last = body, default, asked
        return asked

    def _obstacle(
        self, body: PredictLatency, instance: Instance, asked: Candidate, now_ns: int
    ) -> tuple[NoPredictionReason, str] | None:
        record, snapshot = instance.record, instance.snapshot
        if body.model != record.model:
            return NoPredictionReason.OTHER_MODEL, f"it serves {record.model}"
        if snapshot is not None and snapshot is not instance.rolled and not plausible(snapshot):
            self._metrics.snapshots.add("absurd")
            instance.lose()
            return NoPredictionReason.NO_SNAPSHOT, "its last snapshot has figures that no engine can have"
        if snapshot is None:
            return NoPredictionReason.NO_SNAPSHOT, "it has told nothing yet"
        if instance.member.state is MemberState.SILENT:
            return NoPredictionReason.STALE_SNAPSHOT, f"silent for {instance.member.silence_ns(now_ns) / 1e9:.1f} s"
        if instance.told_ns - snapshot.at_ns > STUCK_NS_MAX and instance.busy:
            return NoPredictionReason.STALE_SNAPSHOT, f"no step in {(instance.told_ns - snapshot.at_ns) / 1e9:.1f} s"
        if instance.member.state is MemberState.DRAINING:
            return NoPredictionReason.DRAINING, ""
        refusal = asked.refusal(instance.parameters)
        if refusal is not None:
            return NoPredictionReason.TOO_LONG, refusal
        if instance.calibration.kin.cost is None:
            name = record.step_time or "none"
            return NoPredictionReason.NO_STEP_TIME, f"step-time set {name!r} is not here, and too few steps were seen"
        return None

    def _rolled(self, instance: Instance, statistics: OutcomeStatistics, until_ns: int) -> Forecaster:
        """The instance's state at that time; loaded anew only where a new snapshot came."""
        kin, forecaster = instance.calibration.kin, instance.forecaster
        if forecaster is None or instance.lengths_version != statistics.version or instance.fits != kin.fits:
            assert kin.cost is not None
            default = statistics.default_output_tokens
            forecaster = Forecaster(kin.cost, instance.parameters, default_output_tokens=default)
            instance.forecaster, instance.rolled, instance.scale_told = forecaster, None, 1.0
            instance.lengths_version, instance.fits = statistics.version, kin.fits
        if instance.rolled is None:
            self._load(instance, forecaster)
        if until_ns > instance.rolled_ns:
            instance.rolled_ns = until_ns
        forecaster.advance(instance.rolled_ns)
        return forecaster

    def _load(self, instance: Instance, forecaster: Forecaster) -> None:
        snapshot = instance.snapshot
        assert snapshot is not None
        for sequence in instance.drop_shown():
            self._metrics.placements.add("shown")
            forecaster.forget(sequence)
        if instance.scale_told != instance.scale:  # it compiles the costs anew
            forecaster.set_scale(instance.scale)
            instance.scale_told = instance.scale
        forecaster.load(snapshot, instance.prefixes.see(snapshot))
        instance.rolled, instance.rolled_ns = snapshot, snapshot.at_ns
        for sequence, placement in instance.placements.items():
            forecaster.add(sequence, placement.candidate, max(placement.at_ns, snapshot.at_ns))
