"""A new service (tests/census.py) beside a cluster that runs: an entry in the cluster's file, and no file else."""

import json
import math
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from millrace.cli.cluster_view import ClusterView

from tests.live.ingress_rig import write_model_folder
from tests.testbed.timed_streams import client
from tests.testbed.up_cluster import PORTS, UpRig, free_port, prompt_text, stream

CLUSTER = """
[[models]]
name = "m"
path = "model"

[[models.groups]]
engine = "modelled"

[[extra_services]]
name = "census"
module = "tests.census"
role = "coordinator"
settings = {{ instance = "worker-0" }}

[telemetry]
metrics_port = {port}
"""


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpRig]:
    folder = tmp_path_factory.mktemp("up")
    write_model_folder(folder / "model")
    (folder / "cluster.toml").write_text(CLUSTER.format(port=free_port()))
    with UpRig.of_words(folder / "cluster", ["--cluster", str(folder / "cluster.toml")], model="m") as rig:
        yield rig


def services(rig: UpRig) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(rig.cli("status", "--json"))["services"]}


def uptime_s(view: ClusterView) -> float:
    rows = view.services(time.time_ns())
    return next((row.uptime_s for row in rows if (row.name, row.state) == ("census-0", "alive")), math.inf)


async def counted(http: httpx.AsyncClient, rig: UpRig) -> str:
    port = json.loads((rig.folder / "run" / "census-0.json").read_text())["telemetry"]["metrics_port"]
    assert port >= PORTS[0]
    return (await http.get(f"http://127.0.0.1:{port}/metrics")).text


async def test_it_is_started_hears_what_its_role_may_and_comes_back_when_it_has_ended(rig: UpRig) -> None:
    assert services(rig)["census-0"]["role"] == "census"
    async with client(60) as http:
        for number in range(5):
            assert not (await stream(http, rig, prompt_text(number), max_tokens=2)).error
        assert 'census_decisions_total{instance="worker-0"} 5.0' in await counted(http, rig)
    assert services(rig)["census-0"]["uptime_s"] > 0
    for number in (signal.SIGKILL, signal.SIGTERM):
        (pid,) = rig.pids("tests.census")
        ended_s = time.monotonic()
        os.kill(pid, number)
        await rig.until_seen(lambda view: uptime_s(view) < time.monotonic() - ended_s)  # noqa: B023 awaited here
