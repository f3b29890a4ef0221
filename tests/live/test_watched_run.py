"""A simulated run that viewers watch as it goes on, and harm (simulator/scenarios/shown_run.py)."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import pytest
from millrace.enginemodel.coefficients import load_step_time

from simulator.scenarios.reading import scenario_of
from simulator.scenarios.running import run_scenario
from simulator.scenarios.shown_run import WatchedRun


def post(url: str, order: str) -> int:
    headers = {"authorization": "Bearer simulation"}
    request = urllib.request.Request(f"{url}order", json.dumps({"order": order}).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return int(answer.status)


def lines(url: str) -> Iterator[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}stream", timeout=60) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


def test_a_run_waits_for_somebody_who_looks_on_and_is_harmed_by_a_click() -> None:
    spec = scenario_of({"cluster": {"groups": [{"name": "w", "instances": 2}]}, "workload": {"count": 60}})
    said: Queue[str] = Queue()
    watched = WatchedRun("two", 0, said.put)

    def look() -> list[str]:
        url = said.get(timeout=60).split()[1]
        kinds: list[str] = []
        stream = lines(url)
        next(stream)
        post(url, "pace 16")
        post(url, "slow_link w-1")
        post(url, "kill w-0")
        with pytest.raises(urllib.error.HTTPError):
            post(url, "kill nobody")
        for frame in stream:
            kinds += [event.get("state", event["k"]) for event in frame.get("d", {}).get("e", {}).values()]
            if {"OrderGiven", "dead"} <= set(kinds):
                break
        return kinds

    with ThreadPoolExecutor(1) as pool:
        looked = pool.submit(look)
        outcome = run_scenario(spec, step_times=load_step_time, shown=watched)
        kinds = looked.result()
    assert kinds.count("OrderGiven") == 2
    assert outcome.outcomes == {"completed": 60}
    assert "slow_link" in said.get()
    assert "kill" in said.get()
