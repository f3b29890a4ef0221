"""Two shipped models on real vLLM engines under one ingress."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bench.up_cluster import UpRig, stream

PROMPT = "Count from 1 to 12."


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpRig]:
    folder: Path = tmp_path_factory.mktemp("two-models")
    cluster = UpRig.of_words(folder, ["--models", "nano,micro", "--instances", "2"], model="millrace-nano")
    cluster.start()
    yield cluster
    sockets = folder / "run" / "ipc"
    assert any(path.is_socket() for path in sockets.iterdir()), "vLLM puts its sockets elsewhere"
    cluster.stop()
    assert not sockets.exists()


async def test_each_model_answers_from_an_engine_of_its_own(rig: UpRig) -> None:
    async with httpx.AsyncClient(timeout=120) as client:
        listed = (await client.get(f"{rig.url}/v1/models")).json()["data"]
        assert sorted(model["id"] for model in listed) == ["millrace-micro", "millrace-nano"]
        lengths = {"millrace-nano": 5, "millrace-micro": 9}
        for model, count in lengths.items():
            result = await stream(client, rig, PROMPT, model=model, max_tokens=count, ignore_eos=True)
            assert (result.error, result.usage["completion_tokens"]) == ("", count)
    rows = json.loads(rig.cli("status", "--json"))["instances"]
    assert {row["model"]: row["output_tokens"] for row in rows} == lengths
