"""Two shipped models on real vLLM engines under one ingress."""

import json

import httpx

from tests.testbed.up_cluster import UpRig, stream

PROMPT = "Count from 1 to 12."
LENGTHS = {"millrace-nano": 5, "millrace-micro": 9}


def _output_tokens(rig: UpRig) -> dict[str, int]:
    rows = json.loads(rig.cli("status", "--json"))["instances"]
    return {row["model"]: row["output_tokens"] for row in rows}


async def test_each_model_answers_from_an_engine_of_its_own(rig: UpRig) -> None:
    async with httpx.AsyncClient(timeout=300) as client:
        listed = (await client.get(f"{rig.url}/v1/models")).json()["data"]
        assert sorted(model["id"] for model in listed) == ["cascade", *sorted(LENGTHS)]
        before = _output_tokens(rig)
        for model, count in LENGTHS.items():
            result = await stream(client, rig, PROMPT, model=model, max_tokens=count, ignore_eos=True)
            assert (result.error, result.tokens) == ("", count)
    after = _output_tokens(rig)
    assert {model: after[model] - before[model] for model in LENGTHS} == LENGTHS
