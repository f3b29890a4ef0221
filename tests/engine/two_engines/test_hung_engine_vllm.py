"""A vLLM process that hangs (SIGSTOP) under load: its streams go on elsewhere, and new requests avoid it."""

import asyncio
import os
import signal

from tests.live.faults import PROMPTS, expect_identical, expected_outcomes, undisturbed
from tests.testbed.up_cluster import UpRig, offer

LENGTH = {"max_tokens": 100, "ignore_eos": True}
HANGS = ("millrace_ingress_continuations_total", 'reason="instance_hung"')
RATE = 4.0
SECONDS = 8


async def dispatched(rig: UpRig, instance: str) -> float:
    return await rig.metric("millrace_ingress_dispatches_total", f'instance="{instance}"')


async def test_everything_ends_while_the_engine_hangs_and_it_is_used_again_afterwards(rig: UpRig) -> None:
    expected = await expected_outcomes(rig, **LENGTH)
    hangs = await rig.metric(*HANGS)
    hung = rig.log_pids("worker-1")[-1]
    load = asyncio.create_task(offer(rig, rate=RATE, count=int(RATE * SECONDS), prompts=PROMPTS, **LENGTH))
    await asyncio.sleep(1)
    os.kill(hung, signal.SIGSTOP)
    try:
        await asyncio.sleep(SECONDS / 3)
        before = await dispatched(rig, "worker-1")
        results = await asyncio.wait_for(load, 90)
        assert await dispatched(rig, "worker-1") == before, "new requests went to the engine that hangs"
    finally:
        os.kill(hung, signal.SIGCONT)
    expect_identical(results, expected)
    assert await rig.metric(*HANGS) > hangs
    await rig.well(2)
    assert await undisturbed(rig, **LENGTH) == expected
    assert await dispatched(rig, "worker-1") > before, "it is used again"
