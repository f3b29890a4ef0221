"""LoRA adapters in a cluster of two real engines: models of their own, through a kill and loads while it runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.live.faults import expect_identical, expected_outcomes, kill, under_fire
from tests.testbed import tiny_llama, tiny_lora
from tests.testbed.timed_streams import client
from tests.testbed.up_cluster import UpRig, prompt_text

pytestmark = pytest.mark.timeout(600)

LAW: dict[str, Any] = {"model": "law", "max_tokens": 250, "ignore_eos": True}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpRig]:
    """In bfloat16, which vLLM's dtype auto makes of float32. Whoever is killed shall have had work."""
    folder = tmp_path_factory.mktemp("lora")
    model = tiny_llama.build(folder / "model")
    for seed, name in enumerate(("sql", "law")):
        tiny_lora.build(folder / name, seed=seed, layers=2)
    extra = (
        *("--set", f'models.0.adapters={{sql = "{folder / "sql"}"}}', "--set", "worker.engine_args.max_loras=2"),
        *("--policy", "round_robin", "--set", "ingress.continuation.deadline_s=120"),
        *("--set", "worker.enforce_eager=true"),
    )
    with UpRig(folder / "c", model_path=model, engine="vllm", instances=2, extra=extra) as cluster:
        yield cluster


async def post(rig: UpRig, path: str, **body: Any) -> Any:
    async with client(120) as http:
        return await http.post(rig.url + path, json=body)


async def ask(rig: UpRig, model: str, **fields: Any) -> str:
    body = {"prompt": prompt_text(1), "max_tokens": 40, "temperature": 0, "ignore_eos": True, **fields}
    answer = await post(rig, "/v1/completions", model=model, **body)
    if answer.status_code != 200:
        return str(answer.status_code)
    assert answer.json()["model"] == model
    return answer.json()["choices"][0]["text"]


async def test_an_adapter_is_a_model_and_more_come_and_go_also_where_a_worker_comes_back(rig: UpRig) -> None:
    async with client() as http:
        cards = {card["id"]: card for card in (await http.get(f"{rig.url}/v1/models")).json()["data"]}
    assert (cards["sql"]["parent"], Path(cards["sql"]["root"]).name) == ("m", "sql")
    assert await ask(rig, "law") == "404"
    path = str(rig.folder.parent / "law")
    assert (await post(rig, "/v1/load_lora_adapter", lora_name="law", lora_path=path)).status_code == 200
    answers = {await ask(rig, "law") for _ in range(4)}
    assert len(answers) == 1, "both engines have it"
    assert len(answers | {await ask(rig, "sql"), await ask(rig, "m")}) == 3
    expected = await expected_outcomes(rig, **LAW)
    before = await rig.metric("millrace_ingress_continuations_total")
    killed = await under_fire(rig, lambda: kill(rig.log_pids("worker-1")[0]), seconds=2, shots=1, **LAW)
    expect_identical(killed, expected)
    assert await rig.metric("millrace_ingress_continuations_total") > before
    await rig.well(2)
    assert {await ask(rig, "law") for _ in range(4)} == answers, "what comes back loads it again when it is asked to"
    assert (await post(rig, "/v1/unload_lora_adapter", lora_name="law")).status_code == 200
    assert await ask(rig, "law") == "404"
    missing = await post(rig, "/v1/load_lora_adapter", lora_name="none", lora_path="/nowhere")
    assert missing.status_code == 404
