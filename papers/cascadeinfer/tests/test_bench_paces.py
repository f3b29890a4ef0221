"""Time per token of one stage: the planner's closed form against simulated engines."""

from __future__ import annotations

import pytest
from millrace.policies.stages.objectives import Constraints, open_costs
from millrace.policies.stages.statistics import BINS

from papers.cascadeinfer.bench.stages.runs import Job, run_one
from papers.cascadeinfer.bench.stages.setups import Setup


@pytest.mark.parametrize(
    ("trace", "requests", "bound"),
    [("Azure", 2_400, 0.08), ("R1", 300, 0.08), ("ShareGPT", 3_000, 0.05), ("Mooncake", 600, 0.2)],
)
def test_the_time_per_token_of_one_stage_is_the_simulated_one(trace: str, requests: int, bound: float) -> None:
    # Long prompts come in bursts, which a mean rate does not know: the bound of Mooncake is wide for that.
    setup = Setup(trace=trace, load=0.6, instances=4, requests=requests)
    costs = open_costs(setup.statistics(), setup.model(), (0, BINS), setup.instances, Constraints())
    found = run_one(Job(label="one stage", spec=setup.spec({})))
    assert float(costs.pace_s[0, 1, setup.instances]) == pytest.approx(found.tpot, rel=bound)
