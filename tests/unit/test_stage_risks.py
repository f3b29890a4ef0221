"""Layouts that are good on average only: crowded stages, latency bounds, layouts that cannot be entered at once."""

import math
import random
from collections.abc import Sequence

import msgspec
import pytest
from millrace.policies.stages import PlanningView, search
from millrace.policies.stages.deciding import decide_by
from millrace.policies.stages.instance import InstanceModel
from millrace.policies.stages.membership import StageShape
from millrace.policies.stages.objectives import Constraints, open_costs
from millrace.policies.stages.paces import open_paces
from millrace.policies.stages.risks import LatencyBounds, over_bounds, stage_state
from millrace.policies.stages.statistics import BINS, EDGES, LengthStatistics, statistics_of
from millrace.policies.stages.view import PlanningParameters, StageDecision

from tests.unit import stage_cases

H200 = msgspec.structs.replace(stage_cases.H200, per_prefill_token_s=21e-6, max_sequences=256)
ANY = (0, BINS)


def lengths(rate: float, *, prompt: float = 300, output: float = 1_500, sigma: float = 1.2) -> LengthStatistics:
    """Log-normal prompts and outputs at a rate per second."""
    rng = random.Random("lengths")
    prompts = [max(1, round(rng.lognormvariate(math.log(prompt), 1.0))) for _ in range(3_000)]
    outputs = [max(1, min(30_000, round(rng.lognormvariate(math.log(output), sigma)))) for _ in range(3_000)]
    return statistics_of(prompts, outputs, span_s=3_000 / rate)


def decided(statistics: LengthStatistics, model: InstanceModel = H200, **changes: object) -> StageDecision:
    """The decision of the exact search on eight instances."""
    current = changes.pop("current", ())
    view = PlanningView(instances=8, statistics=statistics, instance=model, current=current)  # type: ignore[arg-type]
    return decide_by(search.exact, view, PlanningParameters(**changes))  # type: ignore[arg-type]


def test_the_spread_grows_towards_saturation_and_falls_with_the_number_of_instances() -> None:
    def over_poisson(rate: float) -> float:
        _, sequences, deviation = open_paces(lengths(rate), H200, ANY, 8)
        return float(deviation[0, 1, 8] * math.sqrt(8 * sequences[0, 1, 8]))

    assert 1 < over_poisson(4.0) < over_poisson(8.0) < over_poisson(10.5)
    one, four = (open_paces(lengths(2.0 * k), H200, ANY, 2 * k)[2][0, 1, 2 * k] for k in (1, 4))
    assert four == pytest.approx(one / 2, rel=0.02)


def test_a_stage_must_hold_more_sequences_than_it_has_on_average() -> None:
    found = lengths(10.0)
    _, sequences, deviation = open_paces(found, H200, ANY, 8)
    mean, spread = float(sequences[0, 1, 8]), float(deviation[0, 1, 8])
    model = msgspec.structs.replace(H200, max_sequences=round(mean * (1 + spread)))

    def fits(deviations: float) -> bool:
        costs = open_costs(found, model, ANY, 8, Constraints(spare_deviations=deviations))
        return math.isfinite(float(costs.cost[0, 1, 8]))

    assert fits(0.0)
    assert fits(0.9)
    assert not fits(1.64)


def test_the_share_beyond_the_bounds_falls_with_the_bound_and_rises_with_the_rate() -> None:
    parts = [(0, 1, 8)]

    def over(rate: float, tpot_ms: float) -> float:
        return over_bounds(lengths(rate), H200, ANY, parts, LatencyBounds(tpot_ms=tpot_ms))

    state = stage_state(lengths(9.0), H200, ANY, 8)
    mean_ms = 1e3 * state.pace_s
    shares = [over(9.0, mean_ms * factor) for factor in (0.5, 1.0, 1.1, 2.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.99
    assert 0.2 < shares[1] < 0.8
    assert shares[3] < 1e-3
    assert over(10.0, mean_ms * 1.1) > shares[2]
    assert over(500.0, 1e6) == 1.0, "no steady state"


def test_a_layout_that_takes_requests_beyond_their_bounds_gives_way_to_a_more_even_one_or_to_one_stage() -> None:
    found = lengths(9.0)

    def parts_of(shapes: Sequence[StageShape]) -> tuple[tuple[int, ...], list[search.Part]]:
        edges = (*(EDGES.index(shape.length_min) for shape in shapes), BINS)
        return edges, [(k, k + 1, shape.instances) for k, shape in enumerate(shapes)]

    def lost(shapes: Sequence[StageShape], bounds: LatencyBounds) -> float:
        """More than one stage loses."""
        one = over_bounds(found, H200, ANY, [(0, 1, 8)], bounds)
        return over_bounds(found, H200, *parts_of(shapes), bounds) - one

    free = decided(found, bounds=LatencyBounds(loss_max=1.0))
    assert len(free.shapes) > 1
    edges, parts = parts_of(free.shapes)
    slowest = max(stage_state(found, H200, (edges[i], edges[j]), d).pace_s for i, j, d in parts)
    one = stage_state(found, H200, ANY, 8)
    assert slowest > 1.05 * one.pace_s
    between = LatencyBounds(tpot_ms=1e3 * (slowest + one.pace_s) / 2)
    assert lost(free.shapes, between) > between.loss_max
    kept = decided(found, bounds=between)
    assert kept.shapes != free.shapes
    assert lost(kept.shapes, between) <= between.loss_max


def test_a_layout_that_cannot_hold_who_runs_now_is_reached_in_steps() -> None:
    # Unequal lengths cost so much that one stage holds several times the sequences of the best layout.
    model = msgspec.structs.replace(H200, tail_s=200e-9, tail_decodes_min=8)
    found = lengths(5.0, output=2_500)
    layouts: list[tuple[StageShape, ...]] = []
    for _ in range(6):
        layouts.append(decided(found, model, current=layouts[-1] if layouts else ()).shapes)
    assert len(layouts[0]) > 1
    assert layouts[0] != layouts[-1], "the first is a step on the way"
    assert layouts[-1] == layouts[-2], "the last one stays"


@pytest.mark.parametrize("wrong", [{"ttft_ms": 0.0}, {"tpot_ms": -1.0}, {"loss_max": 1.5}])
def test_bounds_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="out of range"):
        LatencyBounds(**wrong)
