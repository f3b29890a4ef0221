"""Requests to a cascade through OpenAI's client, and faults among them; the same for modelled and real engines."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import openai
from millrace.actor.bucket_reading import read_bucket
from millrace.cli.bus import open_bus
from millrace.cli.cluster import resolve_connection
from millrace.contracts.cascade import CascadePlan
from millrace.contracts.codec import decode, encode
from millrace.contracts.subjects import Subjects, subject_token

from tests.testbed.timed_streams import client
from tests.testbed.up_cluster import UpRig

OUTCOMES = {"delivered", "rejected", "rejected_early", "failed", "cancelled"}
#: Reasons that say that a tier is missing, and by which one knows that it was.
MISSING = "tier_unavailable"


class Answer(msgspec.Struct, kw_only=True):
    """Answer of a cascade, as its client got it.

    Attributes:
        prompt: What it asked.
        model: Who answered.
        cascade: The field of that name in the body, or in the last chunk.
        usage: Of the delivered answer, with ``cascade.attempts``.
        error: Empty where there was none.
    """

    prompt: str
    text: str = ""
    model: str = ""
    cascade: dict[str, Any] = {}
    usage: dict[str, Any] = {}
    error: str = ""

    def check(self, tiers: Sequence[str]) -> None:
        """Raises AssertionError where the answer contradicts itself."""
        assert not self.error, self.error
        told, attempts = self.cascade, self.cascade["attempts"]
        assert self.model == told["model"] == tiers[told["tier"]]
        assert {attempt["outcome"] for attempt in attempts} <= OUTCOMES
        (delivered,) = [attempt for attempt in attempts if attempt["outcome"] == "delivered"]
        assert delivered["model"] == self.model
        used = self.usage["cascade"]["attempts"]
        assert [each["model"] for each in used] == [each["model"] for each in attempts]
        index = attempts.index(delivered)
        assert used[index]["completion_tokens"] == self.usage["completion_tokens"]


async def ask(client: openai.AsyncOpenAI, model: str, prompt: str, *, stream: bool, **fields: Any) -> Answer:
    """One chat completion, greedy, whole or streamed."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        **fields,
    }
    answer = Answer(prompt=prompt)
    try:
        if stream:
            await _read_stream(client, body, answer)
        else:
            told = await client.chat.completions.create(**body)
            answer.text, answer.model = told.choices[0].message.content or "", told.model
            _take(answer, told)
    except openai.OpenAIError as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


async def _read_stream(client: openai.AsyncOpenAI, body: dict[str, Any], answer: Answer) -> None:
    chunks = await client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True})
    async for chunk in chunks:
        answer.model = chunk.model
        answer.text += "".join(choice.delta.content or "" for choice in chunk.choices)
        if chunk.usage:
            _take(answer, chunk)


def _take(answer: Answer, told: Any) -> None:
    answer.cascade = (told.model_extra or {}).get("cascade") or {}
    answer.usage = told.usage.model_dump()


def client_of(rig: UpRig) -> openai.AsyncOpenAI:
    """OpenAI's client of a cluster, without retries of its own."""
    http = client(300)
    return openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0, http_client=http)


async def barrage(
    rig: UpRig,
    cascade: str,
    prompts: Sequence[str],
    *,
    count: int,
    rate: float,
    faults: Mapping[int, Callable[[], Any]],
    **fields: Any,
) -> list[Answer]:
    """Ask ``count`` times at ``rate`` a second, every other time as a stream; returns all answers in order.

    Args:
        faults: Called just before the request of that number; coroutines run beside the requests.
    """
    tasks: list[asyncio.Task[Answer]] = []
    side: list[asyncio.Task[Any]] = []
    async with client_of(rig) as client:
        for number in range(count):
            if number in faults and asyncio.iscoroutine(begun := faults[number]()):
                side.append(asyncio.create_task(begun))
            prompt = prompts[number % len(prompts)]
            tasks.append(asyncio.create_task(ask(client, cascade, prompt, stream=number % 2 == 1, **fields)))
            await asyncio.sleep(1 / rate)
        answers = [await task for task in tasks]
    for task in side:
        await task
    return answers


async def swap_thresholds(rig: UpRig, cascade: str, *thresholds: float) -> CascadePlan:
    """Put other thresholds in force, as ``millrace plan --apply`` does; one per tier but the last."""
    plan = await plan_in_force(rig, cascade)
    changed = [
        msgspec.structs.replace(tier, threshold=value) for tier, value in zip(plan.tiers, thresholds, strict=False)
    ]
    after = msgspec.structs.replace(
        plan, epoch=plan.epoch + 1, tiers=[*changed, plan.tiers[-1]], coordinator="operator", reason="a test"
    )
    connection = _connection(rig)
    async with open_bus(connection, store=True) as bus:
        bucket = Subjects(connection.cluster).bucket("cascade")
        await bus.jetstream().publish(f"$KV.{bucket}.{subject_token(cascade)}", encode(after))
    return after


async def plan_in_force(rig: UpRig, cascade: str) -> CascadePlan:
    """The published plan of a cascade."""
    connection = _connection(rig)
    async with open_bus(connection, store=True) as bus:
        found = [decode(value) for value in await read_bucket(bus, Subjects(connection.cluster).bucket("cascade"))]
    (plan,) = [body for body in found if isinstance(body, CascadePlan) and body.cascade == cascade]
    return plan


def _connection(rig: UpRig) -> Any:
    words = dict.fromkeys(("cluster", "nats", "user", "password", "tls"))
    return resolve_connection(argparse.Namespace(dir=str(rig.folder), **words), operator=True)
