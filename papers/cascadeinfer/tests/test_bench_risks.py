"""Share of requests beyond their latency bounds: the planner's closed form against simulated engines."""

from __future__ import annotations

from millrace.policies.stages.membership import StageShape
from millrace.policies.stages.risks import LatencyBounds, over_bounds
from millrace.policies.stages.statistics import BINS, EDGES

from papers.cascadeinfer.bench.stages.runs import Job, run_one
from papers.cascadeinfer.bench.stages.setups import Setup
from papers.cascadeinfer.bench.stages.variants import hand_over


def test_a_layout_whose_mean_is_better_loses_the_share_that_was_predicted() -> None:
    # Azure's lengths on half the instances of the comparison; the bound is a tenth above the slower stage's mean.
    setup = Setup(
        trace="Azure", load=0.8, instances=4, requests=3_000, changes={"slo": {"ttft_ms": 1e3, "tpot_ms": 29}}
    )
    shapes = (
        StageShape(length_min=0, length_max=1448, instances=2),
        StageShape(length_min=1448, length_max=None, instances=2),
    )
    edges, bounds = (0, EDGES.index(1448), BINS), LatencyBounds(ttft_ms=1e3, tpot_ms=29.0)

    def predicted(parts: list[tuple[int, int, int]]) -> float:
        return over_bounds(setup.statistics(), setup.model(), edges, parts, bounds)

    one = run_one(Job(label="one stage", spec=setup.spec({})))
    two = run_one(Job(label="two stages", spec=setup.spec(hand_over(shapes))))
    assert two.norm < one.norm
    expected = predicted([(0, 1, 2), (1, 2, 2)]) - predicted([(0, 2, 4)])
    assert expected > 0.02
    assert abs((one.good - two.good) - expected) < 0.05
