"""Requests that real vLLM refuses: one 400 that names the field, from one engine, and the next request is served."""

import re
from typing import Any

import httpx
import pytest

from tests.testbed.up_cluster import UpRig, prompt_text, stream

#: A source file of the engine's libraries, with or without its line.
SOURCE_FILE = re.compile(r"\.(cc|cpp|cu|h|hpp|py)\b")


#: Constraints that ingress passes on; the first worker tries them, and no engine gets them.
REFUSED_BY_VLLM: dict[str, dict[str, Any]] = {
    "half a grammar": {"grammar": 'root ::= ("a"'},
    "half a regex": {"regex": "(ab"},
    "an endless grammar": {"grammar": "root ::= root"},
    "a schema that is itself": {"json": {"$ref": "#"}},
    "a remote reference": {"json": {"$ref": "https://example.com/schema.json"}},
    "a reference to nothing": {"json": {"$ref": "#/$defs/nothing"}},
}


async def refused(rig: UpRig, fields: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """Return the error of a request that must be refused by a 400, and how many engines it was given to."""
    before = await rig.metric("millrace_ingress_dispatches_total")
    body = {"model": rig.model, "prompt": "x", "max_tokens": 8, **fields}
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(f"{rig.url}/v1/completions", json=body)
        assert answer.status_code == 400, answer.text
        assert not (await stream(client, rig, prompt_text(1), max_tokens=4)).error, "the next request is served"
    error: dict[str, Any] = answer.json()["error"]
    return error, await rig.metric("millrace_ingress_dispatches_total") - before - 1


@pytest.mark.parametrize("name", REFUSED_BY_VLLM)
async def test_a_refusal_by_vllm_names_the_field_and_no_source_file(rig: UpRig, name: str) -> None:
    error, engines = await refused(rig, {"structured_outputs": REFUSED_BY_VLLM[name]})
    assert (error["param"], engines) == ("structured_outputs", 1)
    assert not SOURCE_FILE.search(error["message"]), error
