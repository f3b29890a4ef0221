"""Texts of clients and answers of engines are in no file of a cluster but where a response is stored."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx

from tests.live.faults import shown
from tests.live.ingress_rig import write_model_folder
from tests.testbed.up_cluster import UpRig

SECRET = "Xylophone-quartz-4711"
OPTIONS = ("telemetry.log_level=debug", "telemetry.trace_sample=1", "telemetry.log_format=json")


def texts(rig: UpRig) -> dict[str, str]:
    """Every file of the cluster's folder but JetStream's."""
    files = [path for path in rig.folder.rglob("*") if path.is_file() and "jetstream" not in path.parts]
    return {str(path.relative_to(rig.folder)): path.read_bytes().decode(errors="replace") for path in files}


async def test_at_debug_with_every_request_traced_no_file_has_a_text_or_its_tokens(tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "model")
    options = [word for setting in OPTIONS for word in ("--set", setting)]
    with UpRig(tmp_path / "cluster", model_path=model, engine="modelled", instances=1, extra=options) as rig:
        async with httpx.AsyncClient(base_url=rig.url, timeout=60) as http:
            body = {"model": "m", "prompt": f"Say {SECRET}", "max_tokens": 12, "return_token_ids": True}
            answer = await http.post("/v1/completions", json=body)
            (choice,) = answer.json()["choices"]
            chat = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": SECRET}]}
            assert (await http.post("/v1/chat/completions", json=chat)).status_code == 200
            response = {"model": "m", "input": SECRET, "max_output_tokens": 4, "store": False}
            assert (await http.post("/v1/responses", json=response)).status_code == 200
            for wrong in (f'{{"model": "m", "prompt": "{SECRET}"', json.dumps(body | {"max_tokens": SECRET})):
                assert (await http.post("/v1/completions", content=wrong)).status_code == 400
        request = answer.headers["x-request-id"]
        await shown(rig, "trace", request, "decode")
        assert request in "".join((await asyncio.to_thread(texts, rig)).values())
    prompt, output = choice["prompt_token_ids"], choice["token_ids"]
    assert min(len(prompt), len(output)) >= 12
    secrets = [SECRET, choice["text"]]
    secrets += [separator.join(map(str, ids[:8])) for ids in (prompt, output) for separator in (",", ", ")]
    found = {(name, secret) for name, text in texts(rig).items() for secret in secrets if secret in text}
    assert not found
