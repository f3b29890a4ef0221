"""Schemathesis against ingress's own OpenAPI document: what the document allows is taken, what it does not is refused,
and nothing is a server error. Then bodies that no document has: valid ones whose bytes were changed.

MILLRACE_FUZZ_EXAMPLES sets how many examples a route gets (default 4); 1,000 are over 20,000 bodies of either kind.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from pathlib import Path

import httpx
import pytest

from tests.live.ingress_rig import MemoryValues, Rig, served

SEED = 20260
EXAMPLES = int(os.environ.get("MILLRACE_FUZZ_EXAMPLES", "4"))
LIMIT_S = 480 + 10 * EXAMPLES  # above 280 where other tests have all cores
pytestmark = pytest.mark.timeout(LIMIT_S + 60)
#: Requests that are sent at once.
AT_ONCE = 16
TURNS = [{"role": "user", "content": [{"type": "text", "text": "hi \u00e9"}]}]
SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CHAT = {"model": "tools", "messages": TURNS, "max_tokens": 3}
POOLED = {"model": "tiny", "input": ["a", "b"], "truncate_prompt_tokens": -1}
BODIES = {
    "/v1/chat/completions": CHAT | {"tools": [TOOL], "stream": True, "stream_options": {"include_usage": True}},
    "/v1/chat/completions/batch": {"model": "tiny", "messages": [TURNS], "max_tokens": 2},
    "/v1/completions": {"model": "tiny", "prompt": [[1, 2], [3]], "logprobs": 2, "max_tokens": 2, "stop": ["a"]},
    "/v1/responses": {"model": "tools", "input": TURNS, "max_output_tokens": 3, "previous_response_id": None},
    "/v1/messages": {"model": "tools", "messages": TURNS, "max_tokens": 3, "thinking": {"type": "disabled"}},
    "/v1/messages/count_tokens": {"model": "tools", "messages": TURNS},
    "/v1/embeddings": POOLED | {"encoding_format": "base64"},
    "/pooling": POOLED,
    "/classify": POOLED,
    "/score": {"model": "tiny", "text_1": "a", "text_2": ["b"]},
    "/rerank": {"model": "tiny", "query": "a", "documents": ["b"], "top_n": 1},
    "/tokenize": {"model": "tools", "messages": TURNS, "return_token_strs": True},
    "/detokenize": {"model": "tiny", "tokens": [1, 2]},
    "/invocations": CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
}


async def test_schemathesis_finds_nothing(tmp_path: Path):
    async with served(tmp_path, values=MemoryValues()) as rig:
        command = [
            str(Path(sys.executable).parent / "schemathesis"), "run", f"{rig.url}/openapi.json", "--seed", str(SEED),
            "--max-examples", str(EXAMPLES), "--phases", "examples,coverage,fuzzing", "--checks", "all",
            # A document cannot say that a token id is in the vocabulary or that two fields fit together.
            "--exclude-checks", "positive_data_acceptance", "--no-color", "--request-timeout", "10",
            "--generation-database", "none", "--suppress-health-check", "all",
        ]  # fmt: skip
        print(" ".join(command))
        process = await asyncio.create_subprocess_exec(
            *command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        assert process.stdout is not None
        output, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
        print(output.decode()[-3000:])
        assert process.returncode == 0, output.decode()[-6000:]
        await check_health(rig)


async def test_no_bytes_are_a_server_error_or_hang(tmp_path: Path):
    rng = random.Random(SEED)
    bodies = [(path, body, changed(rng, body)) for path, body in _encoded() for _ in range(EXAMPLES * 2)]
    rng.shuffle(bodies)
    async with (
        served(tmp_path, values=MemoryValues()) as rig,
        httpx.AsyncClient(base_url=rig.url, timeout=60) as client,
    ):

        async def send(path: str, body: bytes) -> int:
            answer = await client.post(path, content=body, headers={"content-type": "application/json"})
            assert answer.status_code < 500, (path, body, answer.text)
            return answer.status_code

        assert [path for path, body in _encoded() if await send(path, body) != 200] == []
        statuses = set[int]()
        for at in range(0, len(bodies), AT_ONCE):
            sent = [send(path, body) for path, _, body in bodies[at : at + AT_ONCE]]
            statuses.update(await asyncio.gather(*sent))
        assert {200, 400} <= statuses
        await check_health(rig)


def _encoded() -> list[tuple[str, bytes]]:
    return [(path, json.dumps(body).encode()) for path, body in BODIES.items()]


def changed(rng: random.Random, body: bytes) -> bytes:
    """The body with up to eight stretches of it removed, doubled, moved or replaced by bytes that JSON minds."""
    pieces = [b"", b"\x00", b"\xff", b"[" * 99, b"9" * 30, *b'" { } , -1 1e999 null \\ud800 NaN'.split()]
    for _ in range(rng.randint(1, 8)):
        begin, other = rng.randrange(len(body) + 1), rng.randrange(len(body) + 1)
        end = min(len(body), begin + rng.choice((0, 1, 1, 2, 8, 40)))
        stretch = rng.choice((*pieces, body[begin:end] * 2, body[other : other + 20], rng.randbytes(4)))
        body = body[:begin] + stretch + body[end:]
    return body


async def check_health(rig: Rig) -> None:
    """It is as well as before."""
    assert rig.bugs == []
    async with httpx.AsyncClient(base_url=rig.url) as client:
        assert (await client.get("/health")).status_code == 200
