"""A cascade of three models on modelled engines under faults: every request is answered, by one attempt's text."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from millrace.contracts.cascade import CascadePlan

from tests.live.cascading import MISSING, ask, barrage, client_of, plan_in_force, swap_thresholds
from tests.live.clusters import described_cluster
from tests.live.faults import PATIENCE_S, kill
from tests.testbed.timed_streams import TimedStream, client, play
from tests.testbed.up_cluster import UpRig, prompt_text

TIERS = ("small", "middle", "large")
CASCADE = "auto"
#: Modelled engines give each token the same log-probability whatever it is, so thresholds alone decide.
PROMPTS = [prompt_text(number) for number in range(8)]
LENGTH = {"max_tokens": 12}

CLUSTER = "".join(
    f"""
[[models]]
name = "{name}"
path = "{name}"

[[models.groups]]
engine = "modelled"
names = ["{name}-0"]
"""
    for name in TIERS
)
CLUSTER += f"""
[cascade]
name = "{CASCADE}"
tiers = ["small", "middle", "large"]
thresholds = [100, 100]
judge = "llm"
parameters = {{ model = "large" }}
"""


rig = described_cluster(CLUSTER, TIERS, CASCADE)


async def _each_models_own(rig: UpRig) -> dict[tuple[str, str], str]:
    """Text of each model for each prompt, asked by its own name."""
    async with client_of(rig) as client:
        asked = [(model, prompt) for model in TIERS for prompt in PROMPTS]
        told = await asyncio.gather(*(ask(client, model, prompt, stream=False, **LENGTH) for model, prompt in asked))
    assert not [answer.error for answer in told if answer.error]
    return {key: answer.text for key, answer in zip(asked, told, strict=True)}


async def _until_every_tier_is_planned(rig: UpRig) -> CascadePlan:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        plan = await plan_in_force(rig, CASCADE)
        if all(tier.instances for tier in plan.tiers):
            return plan
        assert time.monotonic() < deadline, plan
        await asyncio.sleep(0.1)


async def test_requests_over_every_fault_are_answered_without_an_error(rig: UpRig) -> None:
    """Two engines serve at first, as ``large`` is away; later ``middle`` is killed. In the end every tier is asked."""
    own = await _each_models_own(rig)
    await swap_thresholds(rig, CASCADE, 70.0, 70.0)
    assert "large-0 is gone" in rig.cli("drain", "large-0", "--force", "--within", "1")
    faults: dict[int, Callable[[], Any]] = {
        15: lambda: kill(rig.pids("services.judge")[0]),
        40: lambda: swap_thresholds(rig, CASCADE, 0.0, 0.0),
    }
    answers = await barrage(rig, CASCADE, PROMPTS, count=56, rate=8.0, faults=faults, **LENGTH)
    assert "large-0 is ready" in rig.cli("drain", "large-0", "--back")
    await _until_every_tier_is_planned(rig)
    faults = {
        5: lambda: swap_thresholds(rig, CASCADE, 100.0, 70.0),
        20: lambda: kill(rig.pids("middle-0.json")[0]),
        40: lambda: kill(rig.pids("services.coordinator")[0]),
        56: lambda: swap_thresholds(rig, CASCADE, 100.0, 100.0),
    }
    answers += await barrage(rig, CASCADE, PROMPTS, count=72, rate=8.0, faults=faults, **LENGTH)
    for answer in answers:
        answer.check(TIERS)
        assert answer.text == own[answer.model, answer.prompt]
    models = Counter(answer.model for answer in answers)
    reasons = Counter(answer.cascade["reason"] for answer in answers)
    assert set(models) == set(TIERS), (models, reasons)
    assert reasons[MISSING] > 0, "no answer said that a tier was missing"
    assert reasons["score"] > 0
    assert reasons["last_tier"] > 0
    await rig.well(3)
    plan = await _until_every_tier_is_planned(rig)
    assert [tier.threshold for tier in plan.tiers] == [100.0, 100.0, 0.0]
    orders = [json.loads(line) for line in (rig.folder / "run" / "orders.log").read_text().splitlines()]
    assert [100.0, 100.0, 0.0] in [order["thresholds"] for order in orders if order["what"] == "CascadePlan"]


async def test_a_drain_says_what_it_leaves_and_why(rig: UpRig) -> None:
    async with client(60) as http:
        left = TimedStream(settle=1)
        asked = {"model": "small", "prompt": prompt_text(3), "max_tokens": 1200, "ignore_eos": True}
        streaming = asyncio.create_task(play(http, rig, left, **asked))
        await left.settled.wait()
        said = await asyncio.to_thread(rig.cli, "drain", "small-0", "--force", "--within", "1")
        assert "small-0: 0 moved, 1 left (1 no other instance serves the model); handed back" in said, said
        assert "small-0 is ready" in await asyncio.to_thread(rig.cli, "drain", "small-0", "--back")
        assert (await streaming).error == "", "ingress waits for an instance, and goes on there"
