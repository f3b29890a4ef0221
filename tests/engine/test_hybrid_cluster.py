"""Real engines in two stages, of a model with attention and states: requests are handed on, and no token differs."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from millrace.contracts.migration import MigrationOutcome

from tests.live.mover import Mover
from tests.testbed import moving_families
from tests.testbed.timed_streams import TimedStream, client, play
from tests.testbed.up_cluster import UpRig, prompt_text

STREAMS = 8
BROKER = json.dumps({"fences": {"payback_factor": 0}})


@pytest.fixture
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpRig]:
    folder = tmp_path_factory.mktemp("up")
    options = ["--stages", "2", "--trading", "papers/cascadeinfer/trading.py"]
    options += ["--set", f"broker={BROKER}", "--set", "worker.enforce_eager=true"]
    model = moving_families.build(folder / "model", moving_families.FAMILIES["granite4-hybrid"])
    with UpRig(folder / "c", model_path=model, engine="vllm", instances=2, extra=options) as cluster:
        yield cluster


def fields(number: int) -> dict[str, Any]:
    """Every other one is greedy, the others are drawn with a seed of their own."""
    drawn = {"temperature": 0.8, "seed": 100 + number} if number % 2 else {"temperature": 0}
    return {"prompt": 4 * prompt_text(number), "max_tokens": 450, "ignore_eos": True, **drawn}


async def texts(rig: UpRig) -> list[str]:
    async with client() as http:
        streams = await asyncio.gather(*(play(http, rig, TimedStream(), **fields(n)) for n in range(STREAMS)))
    assert not [stream.error for stream in streams if stream.error]
    return [stream.text for stream in streams]


async def test_streams_are_handed_on_at_the_cut_and_not_a_token_differs(rig: UpRig) -> None:
    brokers = [rig.pids(f"migrator-{number}.json")[0] for number in range(2)]
    for broker in brokers:
        os.kill(broker, signal.SIGSTOP)
    async with Mover(rig, modes=()) as onlooker:
        expected = await texts(rig)
        assert not onlooker.heard, "without its broker nothing is handed on"
        for broker in brokers:
            os.kill(broker, signal.SIGCONT)
        await asyncio.sleep(2.0)  # brokers have heard of each other again
        assert await texts(rig) == expected
    moved = [body for body in onlooker.heard if body.outcome is MigrationOutcome.MOVED]
    assert len(moved) >= STREAMS // 2
    assert len({(body.source, body.target) for body in moved}) == 1, "always from the lower stage to the upper one"
