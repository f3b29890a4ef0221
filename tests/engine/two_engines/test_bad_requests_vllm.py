"""Requests that real vLLM refuses: one 400 that names the field, from one engine, and the next request is served."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from tests.testbed.up_cluster import UpRig, prompt_text, stream

pytestmark = pytest.mark.timeout(400)

#: A source file of the engine's libraries, with or without its line.
SOURCE_FILE = re.compile(r"\.(cc|cpp|cu|h|hpp|py)\b")


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "bad", "schema": schema}}}


#: Constraints that ingress passes on, and how many engines are asked: vLLM refuses most before the engine's process has
#: them; what fails within that process is the request's fault once a second engine has failed the same way.
REFUSED_BY_VLLM: dict[str, tuple[dict[str, Any], int]] = {
    "half a grammar": ({"grammar": 'root ::= ("a"'}, 1),
    "half a regex": ({"regex": "(ab"}, 1),
    "an endless grammar": ({"grammar": "root ::= root"}, 2),
}
#: Schemas that no engine gets to see.
REFUSED_BEFORE: dict[str, dict[str, Any]] = {
    "a schema that is itself": {"$ref": "#"},
    "a remote reference": {"$ref": "https://example.com/schema.json"},
    "a reference to nothing": {"$ref": "#/$defs/nothing"},
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
    constraint, asked = REFUSED_BY_VLLM[name]
    error, engines = await refused(rig, {"structured_outputs": constraint})
    assert (error["param"], engines) == ("structured_outputs", asked)
    assert not SOURCE_FILE.search(error["message"]), error


@pytest.mark.parametrize("name", REFUSED_BEFORE)
async def test_a_reference_that_no_grammar_can_have_reaches_no_engine(rig: UpRig, name: str) -> None:
    error, engines = await refused(rig, json_schema(REFUSED_BEFORE[name]))
    assert (error["param"], error["code"], engines) == (
        "response_format.json_schema.schema", "invalid_json_schema", 0,
    )  # fmt: skip
