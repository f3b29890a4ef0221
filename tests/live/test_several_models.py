"""One cluster that serves two models: each request reaches an instance of its own model."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.live.ingress_rig import write_model_folder
from tests.testbed.timed_streams import client
from tests.testbed.up_cluster import UpRig, prompt_text, stream
from tests.testbed.waiting import until

CLUSTER = """
[[models]]
name = "small"
path = "small"

[[models.groups]]
engine = "modelled"
count = 2
processes = 2

[[models]]
name = "large"
path = "large"

[[models.groups]]
engine = "modelled"
names = ["big-0"]
"""


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpRig]:
    folder = tmp_path_factory.mktemp("models")
    write_model_folder(folder / "small", max_model_len=1024)
    write_model_folder(folder / "large", max_model_len=2048)
    (folder / "cluster.toml").write_text(CLUSTER)
    with UpRig.of_words(folder / "cluster", ["--cluster", str(folder / "cluster.toml")], model="small") as cluster:
        yield cluster


def instances(rig: UpRig) -> dict[str, dict[str, Any]]:
    return {row["instance"]: row for row in json.loads(rig.cli("status", "--json"))["instances"]}


async def test_the_api_lists_both_and_each_request_reaches_its_model(rig: UpRig) -> None:
    async with client(60) as http:
        listed = (await http.get(f"{rig.url}/v1/models")).json()["data"]
        assert {model["id"]: model["max_model_len"] for model in listed} == {"small": 1024, "large": 2048}
        small = [await stream(http, rig, prompt_text(n), max_tokens=8, ignore_eos=True) for n in range(4)]
        told = instances(rig)
        assert {name: row["model"] for name, row in told.items()} == {
            "worker-0": "small",
            "worker-1": "small",
            "big-0": "large",
        }
        assert [result.error for result in small] == [""] * 4
        assert (told["worker-0"]["output_tokens"] + told["worker-1"]["output_tokens"]) == 32
        assert told["big-0"]["output_tokens"] == 0
        large = await stream(http, rig, prompt_text(9), model="large", max_tokens=8, ignore_eos=True)
        assert large.error == ""
        assert instances(rig)["big-0"]["output_tokens"] == 8


async def test_a_model_that_nobody_serves_is_refused(rig: UpRig) -> None:
    async with client(60) as http:
        answer = await http.post(f"{rig.url}/v1/completions", json={"model": "huge", "prompt": "x"})
    assert answer.status_code == 404


def test_the_running_cluster_shows_the_specification_that_it_was_started_from(rig: UpRig) -> None:
    shown = rig.cli("cluster", "show")
    assert 'name = "small"' in shown
    assert 'names = ["big-0"]' in shown
    assert f"port = {rig.port}" in shown


async def test_a_drain_says_what_it_leaves_and_why(rig: UpRig) -> None:
    async with client(60) as http:
        left = asyncio.create_task(stream(http, rig, prompt_text(3), model="large", max_tokens=1200, ignore_eos=True))
        await until(lambda: instances(rig)["big-0"]["running"], look_s=0.05)
        said = await asyncio.to_thread(rig.cli, "drain", "big-0", "--force", "--within", "1")
        assert "big-0: 0 moved, 1 left (1 no other instance serves the model); handed back" in said, said
        assert "big-0 is gone" in said
        assert "big-0 is ready" in await asyncio.to_thread(rig.cli, "drain", "big-0", "--back")
        assert (await left).error == "", "ingress waits for an instance, and goes on there"
