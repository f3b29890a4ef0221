"""Faults under load, the same for modelled and real engines: streams at a steady rate while something is killed."""

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import httpx

from tests.testbed.timed_streams import TimedStream, client
from tests.testbed.up_cluster import UpRig, offer, prompt_text, stream
from tests.testbed.waiting import until

RATE = 20.0
PROMPTS = 8

#: Text, finish reason and token count by prompt.
Outcomes = dict[int, tuple[str, str, int]]

#: Longest wait for anything that must come about, seconds.
PATIENCE_S = 60.0


async def undisturbed(rig: UpRig, **fields: Any) -> Outcomes:
    """Return the outcome of each prompt when nothing dies."""
    async with client(120) as http:
        results = await asyncio.gather(*(stream(http, rig, prompt_text(n), **fields) for n in range(PROMPTS)))
    assert not [result.error for result in results if result.error]
    return {number: result.outcome for number, result in enumerate(results)}


#: By cluster, then by the fields of the request.
_EXPECTED: WeakKeyDictionary[UpRig, dict[str, Outcomes]] = WeakKeyDictionary()


async def expected_outcomes(rig: UpRig, **fields: Any) -> Outcomes:
    """Return the first answer of ``undisturbed``: a prompt's outcome depends on the request alone."""
    known = _EXPECTED.setdefault(rig, {})
    key = repr(sorted(fields.items()))
    if key not in known:
        known[key] = await undisturbed(rig, **fields)
    return known[key]


async def under_fire(
    rig: UpRig, shoot: Callable[[], None], *, seconds: float, shots: int, rate: float = RATE, **fields: Any
) -> list[tuple[int, TimedStream]]:
    """Offers load for a while and shoots at equal distances in it."""
    load = asyncio.create_task(offer(rig, rate=rate, count=int(rate * seconds), prompts=PROMPTS, **fields))
    for _ in range(shots):
        await asyncio.sleep(seconds / (shots + 1))
        shoot()
    return await load


async def told(rig: UpRig, **totals: int) -> None:
    """Waits until `status` sums up to these."""
    await rig.until(lambda seen: all(getattr(seen, name) == count for name, count in totals.items()), PATIENCE_S)


async def shown(rig: UpRig, verb: str, request: str, *words: str) -> str:
    """Return the text of `millrace trace` or `explain` about a request once it has all of these words: services write
    their spans a moment after its end.
    """
    async with asyncio.timeout(PATIENCE_S):
        while True:
            said = await asyncio.to_thread(rig.cli, verb, request)
            if all(word in said for word in words):
                return said
            await asyncio.sleep(0.1)


async def asked(rig: UpRig) -> tuple[int, str]:
    """Return status and text of a short answer; 0 where no connection is taken or one breaks."""
    async with httpx.AsyncClient(base_url=rig.url, timeout=30) as http:
        try:
            answer = await http.post("/v1/completions", json={"model": "m", "prompt": "a b", "max_tokens": 2})
        except httpx.TransportError as error:
            return 0, str(error)
        return answer.status_code, answer.text


async def until_served(rig: UpRig) -> None:
    """Waits until requests are answered."""

    async def served() -> bool:
        return (await asked(rig))[0] == 200

    await until(served, look_s=0.1)


def expect_identical(results: list[tuple[int, TimedStream]], expected: dict[int, tuple[str, str, int]]) -> None:
    """No stream failed, and each gave what it gives undisturbed."""
    failed = [result.error for _, result in results if result.error]
    assert not failed, f"{len(failed)} of {len(results)} failed, the first: {failed[0]}"
    for number, result in results:
        assert result.outcome == expected[number], f"prompt {number}: {result.outcome} is not {expected[number]}"


def kill(pid: int) -> None:
    """Kill -9 of one process, which must have been there."""
    os.kill(pid, signal.SIGKILL)
