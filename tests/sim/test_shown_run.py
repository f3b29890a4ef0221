"""A simulated run as its page shows it (simulator/scenarios/shown_run.py)."""

from __future__ import annotations

import json
import zlib
from typing import Any

from millrace.enginemodel.coefficients import load_step_time

from simulator.scenarios.reading import scenario_of
from simulator.scenarios.running import run_scenario
from simulator.scenarios.shown_run import ShownRun

REQUESTS = 40


def frames(shown: ShownRun) -> list[dict[str, Any]]:
    kept = [shown.history.segment(first) for first, _ in shown.history.spans()]
    return [json.loads(line) for segment in kept if segment for line in zlib.decompress(segment).splitlines()]


def test_a_run_is_shown_from_its_first_request_to_its_last() -> None:
    spec = scenario_of({"cluster": {"groups": [{"instances": 3}]}, "workload": {"count": REQUESTS}})
    shown = ShownRun(0)
    outcome = run_scenario(spec, step_times=load_step_time, shown=shown)
    assert len(outcome.finished) == REQUESTS
    told = frames(shown)
    assert [frame["t"] for frame in told] == sorted(frame["t"] for frame in told)
    whole = [frame["k"] for frame in told if "k" in frame]
    assert len(whole) == len(shown.history.spans()) > 1
    seen = {key for frame in told for key in frame.get("d", frame.get("k", {})).get("q", {})}
    assert len(seen) == REQUESTS
    ran = {row["inst"] for tables in whole for row in tables["f"].values()}
    assert len(whole[-1]["i"]) == 3
    assert ran <= whole[-1]["i"].keys()
