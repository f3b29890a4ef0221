"""Loading and unloading LoRA adapters over HTTP, in vLLM's words."""

from pathlib import Path
from typing import Any

import httpx
from millrace.contracts.keyfile import KeyFile, KeyRecord, format_key_file, hash_key
from millrace.contracts.worker import Adapter

from services.ingress.adapters import AdapterAsked, AdapterDone
from services.ingress.http.keys import ApiKeyStore
from tests.live.ingress_rig import FakeCore, served

SQL = {"lora_name": "sql", "lora_path": "/a/sql", "base_model_name": "tiny"}


class AdapterCore(FakeCore):
    """Does as it is told, but for paths that end in ``none`` or ``nowhere``."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters: dict[str, tuple[str, Adapter]] = {}

    def deliver(self, body: Any, traceparent: str) -> None:
        if not isinstance(body, AdapterAsked):
            super().deliver(body, traceparent)
            return
        order, refusal = body.order, ""
        if not order.path:
            del self.adapters[order.name]
        elif order.path.endswith(("none", "nowhere")):
            refusal = f"w0: No adapter found for {order.path}"
        else:
            self.adapters[order.name] = body.model, Adapter(name=order.name, path=order.path, fingerprint="f")
        self._do(
            AdapterDone(
                request=body.request, refusal=refusal, missing=bool(refusal), taken=not order.path.endswith("nowhere")
            )
        )


async def test_an_adapter_is_a_model_from_its_load_to_its_unload(tmp_path: Path) -> None:
    core = AdapterCore()
    async with served(tmp_path, core=core) as rig, httpx.AsyncClient(base_url=rig.url) as client:
        rig.models.adapters = core.adapters

        async def ask() -> httpx.Response:
            return await client.post("/v1/completions", json={"model": "sql", "prompt": "hi", "max_tokens": 2})

        assert (await ask()).status_code == 404
        loaded = await client.post("/v1/load_lora_adapter", json=SQL)
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
        card = (await client.get("/v1/models/sql")).json()
        assert (card["id"], card["root"], card["parent"]) == ("sql", "/a/sql", "tiny")
        assert [each["id"] for each in (await client.get("/v1/models")).json()["data"]] == ["tiny", "tools", "sql"]
        assert (await ask()).json()["model"] == "sql"
        call = core.calls[-1]
        assert (call.model, call.sampling.adapter) == ("tiny", core.adapters["sql"][1])
        again = await client.post("/v1/load_lora_adapter", json=SQL)
        assert again.status_code == 400
        assert "already been loaded" in again.json()["error"]["message"]
        assert (await client.post("/v1/load_lora_adapter", json=SQL | {"load_inplace": True})).status_code == 200
        unloaded = await client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
        assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
        assert (await client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})).status_code == 404
        assert (await ask()).status_code == 404
        for body, status in (
            (SQL | {"lora_path": "/none"}, 404),
            (SQL | {"lora_name": "tools"}, 400),
            ({"lora_name": "sql", "lora_path": "/a"}, 400),
        ):
            assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == status
        nowhere = await client.post("/v1/load_lora_adapter", json=SQL | {"lora_path": "/nowhere"})
        assert (nowhere.status_code, nowhere.json()["error"]["code"]) == (400, "adapters_not_served")
        assert not rig.bugs


async def test_where_keys_are_asked_for_one_needs_the_right(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    records = [KeyRecord(name=name, sha256=hash_key(name), adapters=name == "ada") for name in ("ada", "ben")]
    file.write_text(format_key_file(KeyFile(keys=records)))
    core = AdapterCore()
    async with (
        served(tmp_path, core=core, keys=ApiKeyStore(file)) as rig,
        httpx.AsyncClient(base_url=rig.url) as client,
    ):
        for key, status in (("ben", 403), ("ada", 200)):
            headers = {"authorization": f"Bearer {key}"}
            assert (await client.post("/v1/load_lora_adapter", json=SQL, headers=headers)).status_code == status
