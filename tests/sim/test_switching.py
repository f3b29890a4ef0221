"""Seeds of a cluster whose policies are switched as the autopilot would, under kills; and what a switch changes."""

import pytest

from simulator.soak.switching import SwitchingRun
from tests.sim.soak_seeds import passed, soak_seeds

#: In 147 an ingress is down when it is replaced: it was started again, and stayed.
SEEDS = [*soak_seeds(2), 147]


@pytest.mark.parametrize("seed", SEEDS)
def test_policies_are_switched_under_faults_and_nothing_is_lost(seed: int) -> None:
    assert passed(seed, switches=True).outcomes["completed"]


def test_what_is_proposed_is_in_force_in_the_end() -> None:
    """Seed 1 changes the dispatch policy, which replaces ingresses, and what coordinators plan by."""
    run = SwitchingRun(1, faults=False)
    switched = run.run().switches
    assert {"policies.dispatch.name", "coordinator.step_bounds"} <= set(switched)
    cluster, spec = run.cluster, run.cluster.spec
    assert cluster.leaving
    assert all(each.process is None for each in cluster.leaving)
    policies = {each.actor.state.policy.name for each in cluster.ingresses}  # type: ignore[attr-defined]
    assert policies == {spec.policies.dispatch.name}
