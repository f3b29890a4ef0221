"""Images in a cluster of two real engines: what they give is what plain vLLM gives, also after a kill."""

import asyncio
import base64
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from millrace.contracts.kv import CopierKind
from millrace.contracts.migration import MigrationMode, MigrationOutcome

from tests.engine.bench_engine import reference
from tests.live.faults import kill
from tests.live.mover import Mover
from tests.testbed import tiny_idefics
from tests.testbed.timed_streams import client, events
from tests.testbed.tiny_idefics import png, png_of
from tests.testbed.up_cluster import UpRig

pytestmark = pytest.mark.timeout(600)

PICTURES = [png(seed) for seed in range(4)]
SHARED: dict[str, Any] = {"model": "m", "temperature": 0, "max_tokens": 40, "ignore_eos": True}
#: Text and prompt tokens of each request.
Plain = list[tuple[str, int]]
LONG: dict[str, Any] = {"max_tokens": 560}


def url_of(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode()


def chat(*urls: str, text: str = "What do you see here? ", **fields: Any) -> dict[str, Any]:
    parts: list[Any] = [{"type": "text", "text": text * 10}]  # a block of text that both images follow, and more behind
    parts += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    parts += [{"type": "text", "text": text * 10}]
    return {**SHARED, "messages": [{"role": "user", "content": parts}], **fields}


#: Requests that plain vLLM is asked, too.
ASKED = [chat(url_of(image)) for image in PICTURES[:2]] + [chat(*map(url_of, PICTURES[:2])), chat()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_idefics.build(tmp_path_factory.mktemp("idefics"))


@pytest.fixture(scope="module")
def plain(model: Path) -> Plain:
    """Text and prompt tokens of vLLM's own ``LLM.chat`` for ASKED."""
    fields = {name: SHARED[name] for name in ("temperature", "max_tokens", "ignore_eos")}
    found = reference(model, [(body["messages"], dict(fields)) for body in ASKED], max_num_batched_tokens=1024)
    return [(text, tokens) for text, tokens in found]


@pytest.fixture(scope="module")
def rig(model: Path, plain: Plain, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpRig]:
    extra = ("--policy", "round_robin", "--set", "worker.enforce_eager=true", "--set", "worker.dtype=float32")
    extra += ("--set", 'ingress.http.image_hosts=["127.0.0.1"]', "--set", "ingress.continuation.deadline_s=120")
    folder = tmp_path_factory.mktemp("images")
    with UpRig(folder / "c", model_path=model, engine="vllm", instances=2, extra=extra) as cluster:
        yield cluster


async def post(rig: UpRig, path: str, body: dict[str, Any]) -> httpx.Response:
    async with client(120) as http:
        return await http.post(rig.url + path, json=body)


async def streamed(rig: UpRig, body: dict[str, Any], begun: asyncio.Event | None = None) -> str:
    text = ""
    async with client(120) as http:
        path = f"{rig.url}/v1/chat/completions"
        async with http.stream("POST", path, json=body | {"stream": True}) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for event in events(answer):
                assert "error" not in event, event
                text += event["choices"][0]["delta"].get("content") or ""
                if text and begun is not None:
                    begun.set()
    return text


async def test_answers_are_those_of_vllm_whole_and_streamed(rig: UpRig, plain: Plain) -> None:
    """Each by one engine, then the other: their prefix caches soon have the same text with other images."""
    assert len({text for text, _ in plain}) == len(plain), "the model tells the images apart"
    for body, (text, tokens) in zip(ASKED, plain, strict=True):
        answer = (await post(rig, "/v1/chat/completions", body)).json()
        assert answer["choices"][0]["message"]["content"] == text
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (tokens, 40)
        assert await streamed(rig, body) == text


async def test_streams_go_on_after_a_kill_and_a_drain(rig: UpRig) -> None:
    bodies = [chat(url_of(image), **LONG) for image in PICTURES]
    expected = [(await post(rig, "/v1/chat/completions", body)).json() for body in bodies]
    before = await rig.metric("millrace_ingress_continuations_total")

    async def during(disturb: Any) -> list[str]:
        begun = [asyncio.Event() for _ in bodies]
        streams = [asyncio.create_task(streamed(rig, *each)) for each in zip(bodies, begun, strict=True)]
        await asyncio.gather(*(each.wait() for each in begun))
        await disturb()
        return await asyncio.gather(*streams)

    texts = [answer["choices"][0]["message"]["content"] for answer in expected]
    assert await during(lambda: asyncio.to_thread(kill, rig.log_pids("worker-0")[0])) == texts
    assert await rig.metric("millrace_ingress_continuations_total") > before
    await rig.well(2)
    async with Mover(rig, modes=()) as onlooker:
        assert await during(lambda: asyncio.to_thread(rig.cli, "drain", "worker-0")) == texts
    moved = [body for body in onlooker.heard if body.outcome is MigrationOutcome.MOVED]
    assert {(body.mode, body.cost.copier) for body in moved} == {(MigrationMode.LIVE, CopierKind.SHARED_MEMORY)}


@pytest.mark.parametrize(
    ("url", "code", "words"),
    [
        (url_of(png_of(6000, 6000, b"")), "invalid_image", "6000x6000"),
        (url_of(png_of(100_000, 100_000, b"")), "invalid_image", "10000000000"),
        (url_of(b"nothing"), "invalid_image", "image"),
        (url_of(bytes(800_000)), "images_too_large", "768000"),
        ("data:image/png;base64,%%", "invalid_value", "base64"),
        ("file:///etc/passwd", "invalid_value", "data:image"),
        ("http://169.254.169.254/latest", "image_host_not_allowed", "169.254.169.254"),
        ("http://127.0.0.1:1/none.png", "image_not_fetched", "127.0.0.1:1"),
    ],
)
async def test_images_that_cannot_be_used_are_told(rig: UpRig, url: str, code: str, words: str) -> None:
    answer = await post(rig, "/v1/chat/completions", chat(url))
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == code
    assert words in answer.json()["error"]["message"]


async def test_images_are_fetched_from_allowed_hosts_and_no_redirect_is_followed(rig: UpRig, plain: Plain) -> None:
    class Pictures(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302 if self.path == "/moved" else 200)
            self.send_header("location", "/red")
            self.end_headers()
            self.wfile.write(PICTURES[0])

        def log_message(self, *told: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pictures) as pictures:
        threading.Thread(target=pictures.serve_forever, daemon=True).start()
        where = f"http://127.0.0.1:{pictures.server_port}"
        answer = await post(rig, "/v1/chat/completions", chat(f"{where}/red"))
        moved = await post(rig, "/v1/chat/completions", chat(f"{where}/moved"))
        pictures.shutdown()
    assert answer.json()["choices"][0]["message"]["content"] == plain[0][0]
    assert (moved.status_code, moved.json()["error"]["code"]) == (400, "image_not_fetched")
