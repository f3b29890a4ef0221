"""Runs in virtual time as a page shows them (simulator/scenarios/shown_run.py)."""

import json
import zlib
from typing import Any

from millrace.enginemodel.coefficients import load_step_time
from millrace.workloads.recording import RecordedLoad, RecordingBegan, RequestServed, StepsComputed

from services.page.actor import PageActor
from simulator.scenarios.reading import scenario_of
from simulator.scenarios.running import run_scenario
from simulator.scenarios.shown_run import ShownRun
from simulator.whatif.recorded_run import recorded_run
from tests.testbed.messages import plain_record

REQUESTS = 40
SECOND = 1_000_000_000


def frames(run: PageActor) -> list[dict[str, Any]]:
    kept = [run.past.segment(first) for first, _ in run.past.spans()]
    return [json.loads(line) for segment in kept if segment for line in zlib.decompress(segment).splitlines()]


def test_a_run_is_shown_from_its_first_request_to_its_last() -> None:
    spec = scenario_of({"cluster": {"groups": [{"instances": 3}]}, "workload": {"count": REQUESTS}})
    shown = ShownRun("three")
    outcome = run_scenario(spec, step_times=load_step_time, shown=shown)
    assert len(outcome.finished) == REQUESTS
    unseen = run_scenario(spec, step_times=load_step_time)
    assert outcome.finished == unseen.finished, "the page costs nobody anything"
    page = shown.page
    told = frames(page)
    assert [frame["t"] for frame in told] == sorted(frame["t"] for frame in told)
    whole = [frame["k"] for frame in told if "k" in frame]
    assert len(whole) == len(page.past.spans()) > 1
    seen, ended = ({key for frame in told for key in frame.get("d", frame.get("k", {})).get(t, {})} for t in "qf")
    assert len(seen) == len(ended) == REQUESTS
    ran = {name for tables in whole for row in tables["f"].values() for name in row["instances"]}
    assert len(whole[-1]["report"]) == 3
    assert ran <= whole[-1]["report"].keys()


def test_a_recording_is_shown_with_the_lengths_and_times_that_it_tells() -> None:
    record = plain_record("w0")
    rows = [
        RequestServed(
            number=n, at_ns=n * SECOND, prompt=30, outputs=(100,), model="m", ttft_ns=SECOND, e2e_ns=11 * SECOND,
            instance="w0", expected=90.0,
        )
        for n in range(4)
    ]  # fmt: skip
    steps = [StepsComputed(instance="w0", at_ns=n * SECOND, wall_ns=SECOND, steps=50, decodes=40) for n in range(1, 14)]
    began, requests = RecordingBegan(run=0), [(0, row) for row in rows]
    load = RecordedLoad(began=began, instances={"w0": record}, requests=requests, steps=steps)
    run = recorded_run(load)
    tables: dict[str, dict[str, Any]] = {}
    most = 0
    for frame in frames(run):
        tables = frame.get("k", tables)
        for table, changes in frame.get("d", {}).items():
            for key, row in changes.items():
                tables[table][key] = tables[table].get(key, {}) | (row or {})
                if row is None:
                    del tables[table][key]
        most = max(most, tables["report"]["w0"]["running"])
    assert most == 4
    assert tables["instance"]["w0"]["blocks_total"] == 100
    assert tables["q"] == {}
    assert {row["e2e_ns"] for row in tables["f"].values()} == {11 * SECOND}
