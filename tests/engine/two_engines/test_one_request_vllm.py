"""One request and what it can make an engine do: neighbours' streams go on (the table of docs/SECURITY.md)."""

import asyncio
import json
import math
from typing import Any

import httpx
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from tests.testbed.timed_streams import TimedStream, client, play
from tests.testbed.up_cluster import UpRig, prompt_text

#: Longest pause of a neighbour's stream, seconds, that is not taken for a standstill on a machine that does other work
#: too, as times of one beside a plain request as well, and how often it is measured before it is believed. What a pause
#: is on an idle machine stands in docs/SECURITY.md; without bounds requests stopped an engine for 5 to 19 s.
PAUSE_S = 2.5
PAUSES = 4
TRIES = 2
CONTINUED = "millrace_ingress_continuations_total"
#: Neighbours that begin each second.
RATE = 4.0
#: How long neighbours are watched around the request, seconds.
AROUND_S = 0.5
TEXT = "Tell a story."


def schema(value: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": value}}}


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        inner = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    return inner


def regex(pattern: str) -> dict[str, Any]:
    return {"structured_outputs": {"regex": pattern}}


#: Makes the engine choose the letter that leaves a grammar in doubt.
ONLY_A = {"logit_bias": {str(sorted(ByteLevel.alphabet()).index("a")): 100}, "max_tokens": 900}
PROPERTIES = {f"p{number:03}": {"type": "string", "pattern": f"^[a-z]{{1,{number + 9}}}$"} for number in range(400)}
#: Requests that are sent one after the other beside the same neighbours -> (fields, the statuses that are right).
GROUPS: list[dict[str, tuple[dict[str, Any], set[int]]]] = [
    {
        "a lookahead": ({"structured_outputs": {"json": {"type": "string", "pattern": "^(?!a)b$"}}}, {400}),
        "a prompt too long": ({"prompt": "x" * 3_000_000}, {400}),
        "nested repetitions": (schema({"type": "string", "pattern": "(a{1,9999}){1,9999}"}), {400}),
        "a regex that compiles for long": (regex("(a{1,99}b?){1,100}(c{1,99}d?){1,100}[a-f]{1,9000}"), {200, 400}),
    },
    {
        "a regex that matches slowly": (regex("(a*)*b") | ONLY_A, {400}),
        "repetitions that match slowly": (regex("(.{0,99}a){0,99}b") | ONLY_A, {200, 400}),
    },
    {
        "a deep schema": (schema(nested(28)), {200, 400}),
        "a schema of many properties": (schema({"type": "object", "properties": PROPERTIES}), {200, 400}),
        "an enum of many values": (schema({"enum": [f"v{number:05}" for number in range(3000)]}), {200, 400}),
        "many choices": ({"structured_outputs": {"choice": [f"c{n:05}" for n in range(1000)]}}, {200}),
    },
    {
        "n": ({"n": 128, "max_tokens": 16}, {200}),
        "log-probabilities": ({"logprobs": 20, "n": 16}, {200}),
        "log-probabilities of a prompt": ({"prompt": "x" * 900, "prompt_logprobs": 10, "max_tokens": 60}, {200}),
        "allowed tokens and bad words": (
            {"allowed_token_ids": list(range(32, 256)), "bad_words": [f"{n:03}" * 30 for n in range(100)], "n": 16},
            {200},
        ),
    },
    {
        "the longest prompt": ({"prompt": "x" * 900, "max_tokens": 60}, {200}),
        "stop strings": ({"stop": ["a" * 1000, "b" * 1000, "ab" * 500, "ba" * 500]}, {200}),
        "logit_bias": ({"logit_bias": {str(token): -100 for token in range(288)}}, {200}),
        "many prompts": ({"prompt": ["x" * 400] * 64, "max_tokens": 16}, {200}),
    },
    {
        "penalties over a long output": (
            {"presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 1.5, "n": 32, "max_tokens": 120},
            {200},
        ),
        "min_tokens": ({"min_tokens": 200, "max_tokens": 200, "n": 8, "stop_token_ids": list(range(256))}, {200}),
    },
]


async def pause_beside(rig: UpRig, *requests: dict[str, Any]) -> tuple[float, list[httpx.Response]]:
    """Longest pause of neighbours' streams beside requests, one after the other, and their answers."""
    answers: list[httpx.Response] = []

    async def request() -> None:
        await asyncio.sleep(AROUND_S)
        plain = {"model": rig.model, "prompt": TEXT, "max_tokens": 60, "ignore_eos": True, "temperature": 0}
        async with httpx.AsyncClient(timeout=90) as sender:
            for fields in requests:
                content = json.dumps(plain | fields)
                headers = {"content-type": "application/json"}
                answers.append(await sender.post(f"{rig.url}/v1/completions", content=content, headers=headers))
        await asyncio.sleep(AROUND_S)

    doing = asyncio.create_task(request())
    streams, tasks = [], []
    async with client() as http:
        while not doing.done():  # some at a time on each engine: the request has neighbours wherever it goes
            streams.append(TimedStream())
            prompt = prompt_text(len(streams) % 8)
            tasks.append(
                asyncio.create_task(play(http, rig, streams[-1], prompt=prompt, max_tokens=60, ignore_eos=True))
            )
            await asyncio.wait([doing], timeout=1 / RATE)
        await asyncio.gather(doing, *tasks)
    errors = [stream.error for stream in streams if stream.error]
    assert not errors, errors
    pause_s = max(max(stream.intervals(0, math.inf), default=0.0) for stream in streams)
    return pause_s, answers


@pytest.fixture(scope="module")
def plain_pause(rig: UpRig) -> float:
    """Longest pause beside a plain request, seconds."""
    return asyncio.run(pause_beside(rig, {}))[0]


@pytest.mark.parametrize("requests", GROUPS, ids=", ".join)
async def test_a_neighbours_stream_goes_on(
    rig: UpRig, plain_pause: float, requests: dict[str, tuple[dict[str, Any], set[int]]]
) -> None:
    for attempt in range(TRIES):
        plain = (await pause_beside(rig, {}))[0] if attempt else plain_pause
        before = await rig.metric(CONTINUED)
        pause, answers = await pause_beside(rig, *(fields for fields, _ in requests.values()))
        taken = await rig.metric(CONTINUED) - before
        for (name, (_, right)), answer in zip(requests.items(), answers, strict=True):
            assert answer.status_code in right, (name, answer.text[:300])
        print(f"longest pause {pause:.2f} s, beside a plain request {plain:.2f} s")
        if pause <= max(PAUSE_S, PAUSES * plain) and not taken:
            break
        assert attempt + 1 < TRIES, f"neighbours stood still for {pause:.2f} s, {taken} were taken from their engine"
