"""Requests to a cascade of the three trained models on two real vLLM engines, over every fault: none fails.

Starts nano and mini on two devices; micro has none at first. 200 requests, every other one as a stream, are asked while
the judge, a tier's engine and the coordinator are killed, thresholds change, and an engine changes its model (nano's
becomes micro's). Each answer must come, name who answered, and its attempts must rise. Aim: no error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
from millrace.actor.bucket_reading import read_bucket
from millrace.contracts.cascade import CascadeMove, CascadePlan
from millrace.contracts.codec import decode, encode
from millrace.contracts.subjects import Subjects, subject_token
from nats.aio.client import Client

from bench.judged.record import draw
from testbed.up_cluster import UpRig

TIERS = ("millrace-nano", "millrace-micro", "millrace-mini")
CASCADE = "auto"
COUNTS, MOVED = (1, 0, 1), (0, 1, 1)
SEED, MAX_TOKENS = 41, 96
#: A move waits for a drained engine and a cold start.
MOVE_LIMIT_S = 240.0

CLUSTER = '[devices]\ncpu = 2\n\n[cascade]\nname = "auto"\njudge = "verifier"\n' + f"tiers = {json.dumps(TIERS)}\n"
GROUP = """
[[models]]
name = "{name}"
path = "{name}"

[[models.groups]]
name = "{name}"
engine = "{engine}"
count = {count}
spares = {spares}
"""


class PlanStore:
    """The cascade's plan in the cluster's store, as an operator reads and writes it."""

    def __init__(self, client: Client, cluster: str) -> None:
        self._client, self._bucket = client, Subjects(cluster).bucket("cascade")
        self._subject = f"$KV.{self._bucket}.{subject_token(CASCADE)}"

    async def read(self) -> CascadePlan:
        """The plan in force."""
        [plan] = [decode(value) for value in await read_bucket(self._client, self._bucket)]
        assert isinstance(plan, CascadePlan)
        return plan

    async def change(self, thresholds: Sequence[float], move: CascadeMove | None = None) -> None:
        """Put other thresholds, or a move, in force; a move that is under way goes on."""
        plan = await self.read()
        tiers = [
            msgspec.structs.replace(tier, threshold=value) for tier, value in zip(plan.tiers, thresholds, strict=True)
        ]
        told = msgspec.structs.replace(
            plan, epoch=plan.epoch + 1, tiers=tiers, move=move or plan.move, coordinator="operator"
        )
        await self._client.jetstream().publish(self._subject, encode(told))

    async def settled(self, counts: Sequence[int]) -> float:
        """Seconds until the plan has these instances and no move."""
        began = time.monotonic()
        while time.monotonic() < began + MOVE_LIMIT_S:
            plan = await self.read()
            if plan.move is None and [sum(each.count for each in tier.replicas) for tier in plan.tiers] == [*counts]:
                return time.monotonic() - began
            await asyncio.sleep(0.2)
        raise TimeoutError(f"no plan with {counts} within {MOVE_LIMIT_S:g} s: {await self.read()}")


class Said(msgspec.Struct, kw_only=True):
    """Outcome of one request: the cascade's own words, or an error."""

    cascade: dict[str, Any] = {}
    model: str = ""
    error: str = ""
    took_s: float = 0.0

    def wrong(self) -> str:
        """Contradiction in it; empty for an answer as it should be."""
        if self.error:
            return self.error
        tiers = [attempt["tier"] for attempt in self.cascade["attempts"] if attempt["outcome"] != "failed"]
        if self.model != TIERS[self.cascade["tier"]] or self.cascade["attempts"][-1]["model"] not in TIERS:
            return f"{self.model} is not who {self.cascade} says"
        delivered = [each for each in self.cascade["attempts"] if each["outcome"] == "delivered"]
        if len(delivered) != 1 or (tiers != sorted(tiers) and self.cascade["reason"] != "tier_unavailable"):
            return f"attempts {self.cascade['attempts']}"
        return ""


def main() -> int:
    """Print what each fault did, and the answers; 1 where one failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=1.5, help="requests/s")
    parser.add_argument("--engine", default="vllm", choices=["vllm", "modelled"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        groups = [
            GROUP.format(name=name, engine=options.engine, count=count, spares=1 - count)
            for name, count in zip(TIERS, COUNTS, strict=True)
        ]
        (Path(folder) / "cluster.toml").write_text(CLUSTER + "".join(groups))
        words = ["--cluster", str(Path(folder) / "cluster.toml")]
        rig = UpRig.of_words(Path(folder) / "cluster", words, model=CASCADE)
        rig.start()
        try:
            return asyncio.run(_run(rig, options.requests, options.rate))
        finally:
            rig.stop()


async def _run(rig: UpRig, count: int, rate: float) -> int:
    bus = await rig.operator_bus(store=True)
    plans = PlanStore(bus, rig.cluster_file()["cluster"])
    await plans.settled(COUNTS)
    faults = _faults(rig, plans, count)
    side: list[asyncio.Task[None]] = []
    async with httpx.AsyncClient(base_url=rig.url, timeout=300) as client:
        asked: list[asyncio.Task[Said]] = []
        for number, example in enumerate(draw(count, SEED)):
            if number in faults:
                name, fault = faults[number]
                side.append(asyncio.create_task(_told(name, number, fault)))
            asked.append(asyncio.create_task(_ask(client, example.prompt, stream=number % 2 == 1)))
            await asyncio.sleep(1 / rate)
        said = [await each for each in asked]
    await asyncio.gather(*side)
    await plans.settled(MOVED)
    await bus.close()
    return _report(said)


def _faults(rig: UpRig, plans: PlanStore, count: int) -> dict[int, tuple[str, Callable[[], Coroutine[Any, Any, str]]]]:
    """By number of the request before which it comes."""

    async def kill(pids: Sequence[int]) -> str:
        os.kill(pids[-1], signal.SIGKILL)
        return "killed"

    async def move() -> str:
        until_ns = time.time_ns() + int(MOVE_LIMIT_S * 1e9)
        kept = [tier.threshold for tier in (await plans.read()).tiers]
        await plans.change(kept, CascadeMove(instances=[*MOVED], before=[*COUNTS], until_ns=until_ns))
        return f"done after {await plans.settled(MOVED):.0f} s"

    async def swap(*thresholds: float) -> str:
        await plans.change(thresholds)
        return f"thresholds {thresholds}"

    told: list[tuple[float, str, Callable[[], Coroutine[Any, Any, str]]]] = [
        (0.10, "judge", lambda: kill(rig.pids("services.judge"))),
        (0.20, "engine of nano", lambda: kill(rig.log_pids(f"{TIERS[0]}-0") or rig.pids(f"{TIERS[0]}-0.json"))),
        (0.40, "thresholds", lambda: swap(90.0, 90.0, 0.0)),
        (0.50, "nano's engine becomes micro's", move),
        (0.55, "coordinator", lambda: kill(rig.pids("services.coordinator"))),
        (0.80, "thresholds", lambda: swap(40.0, 40.0, 0.0)),
    ]
    return {int(share * count): (name, fault) for share, name, fault in told}


async def _told(name: str, number: int, fault: Callable[[], Coroutine[Any, Any, str]]) -> None:
    print(f"before request {number}: {name}: {await fault()}", flush=True)


async def _ask(client: httpx.AsyncClient, prompt: str, *, stream: bool) -> Said:
    body = {
        "model": CASCADE,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "stream": stream,
    }
    began, said = time.monotonic(), Said()
    try:
        answer = await client.post("/v1/chat/completions", json=body)
        answer.raise_for_status()
        told = _last_chunk(answer.text) if stream else answer.json()
        said.cascade, said.model = told["cascade"], told["model"]
    except (httpx.HTTPError, KeyError, ValueError) as error:
        said.error = f"{type(error).__name__}: {error}"
    said.took_s = time.monotonic() - began
    return said


def _last_chunk(text: str) -> dict[str, Any]:
    """The chunk that says what the cascade did.

    Raises:
        ValueError: the stream says nothing of it, or that it failed.
    """
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    chunks: list[dict[str, Any]] = [json.loads(line) for line in lines]
    if not chunks or "cascade" not in chunks[-1]:
        raise ValueError(f"the stream ended with {text[-200:]!r}")
    return chunks[-1]


def _report(said: Sequence[Said]) -> int:
    wrong = [each.wrong() for each in said if each.wrong()]
    took = sorted(each.took_s for each in said)
    print(f"{len(said)} requests, {len(wrong)} wrong; longest {took[-1]:.1f} s, median {took[len(took) // 2]:.1f} s")
    print(f"answered by: {dict(Counter(each.model for each in said))}")
    print(f"because: {dict(Counter(each.cascade.get('reason', '-') for each in said))}")
    outcomes = Counter(attempt["outcome"] for each in said for attempt in each.cascade.get("attempts", []))
    print(f"attempts: {dict(outcomes)}")
    for each in wrong[:5]:
        print(each)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
