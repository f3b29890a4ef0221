"""Scenarios that move running requests between the instances that decode."""

from __future__ import annotations

import pytest
from millrace.enginemodel.coefficients import load_step_time

from papers import PAPERS
from papers.ares.bench.rescheduled import rescheduling
from simulator.scenarios.reading import read_scenario
from simulator.scenarios.running import run_scenario
from simulator.scenarios.statistics import summarise


@pytest.mark.parametrize(
    "settings",
    [
        ["trading.policy=reactive.py", "extension=head.py"],
        ["trading.policy=trading.py", "extension=head.py"],
        ["extension=central.py"],
    ],
)
def test_running_requests_move_between_decode_instances_and_none_is_lost(settings):
    path = PAPERS / "ares" / "testbed.toml"
    size = ["workload.count=24", "workload.warm_up=0", "workload.arrivals.rate_per_s=0.3", "workload.output_limit=4000"]
    spec = read_scenario(path, ["trading.policy=none", *settings, *size])
    outcome = run_scenario(spec, step_times=load_step_time)
    summary = summarise(outcome)
    assert (summary.served, summary.lost) == (24, 0)
    moves = [m for m in outcome.migrations if m.reason in ("order", "balance") and m.outcome == "moved"]
    assert moves
    assert all(m.source.startswith("decode") and m.target.startswith("decode") for m in moves)
    figures = rescheduling(outcome)
    assert figures["moves"] == len(moves)
    assert figures["moved_bytes"] == sum(m.bytes for m in moves) > 0
    assert figures["load_variance"] > 0
