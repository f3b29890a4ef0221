"""Rates over time in pictures of scenarios."""

import numpy as np

from simulator.scenarios.observer import EngineSample
from simulator.scenarios.plots import _Grid

S = 1_000_000_000


def sample(at_s: float, tokens: int, instance: str = "gpu-0") -> EngineSample:
    return EngineSample(
        at_ns=int(at_s * S),
        instance=instance,
        running=1,
        waiting=0,
        blocks_used=1,
        blocks_total=10,
        preemptions=0,
        output_tokens_total=tokens,
    )


def test_an_even_growth_is_an_even_rate_whatever_the_time_between_samples() -> None:
    grid = _Grid.of([sample(at_s, 100 * at_s, name) for at_s in range(48) for name in ("gpu-0", "gpu-1")])
    assert np.allclose(grid.rate("output_tokens_total"), 200.0)


def test_a_restarted_instance_has_no_negative_rate() -> None:
    grid = _Grid.of([sample(at_s, 100 * at_s if at_s < 20 else 100 * (at_s - 20)) for at_s in range(40)])
    assert grid.rate("output_tokens_total").min() >= 0.0
