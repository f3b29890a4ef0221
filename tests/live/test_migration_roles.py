"""Prefill and decode on instances of their own, with modelled engines; and a cluster where nothing moves."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from millrace.contracts.broker import MoveReason
from millrace.contracts.migration import MigrationOutcome

from tests.live.faults import expect_identical, undisturbed
from tests.live.ingress_rig import write_model_folder
from tests.live.mover import Mover
from tests.testbed.timed_streams import client
from tests.testbed.up_cluster import UpRig, offer, prompt_text, stream

LENGTH = {"max_tokens": 120, "ignore_eos": True}
WORKER = ["--set", "worker=" + json.dumps({"modelled": {"speed": 0.5}})]


async def test_each_request_prefills_here_and_decodes_there_with_the_tokens_that_it_has_unmoved(tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "model")
    still = UpRig(
        tmp_path / "still",
        model_path=model,
        engine="modelled",
        instances=1,
        extra=[*WORKER, "--set", "services.migrators=false"],
    )
    still.start()
    try:
        expected = await undisturbed(still, **LENGTH)
        assert not still.pids("services.migrator")
        async with client(60) as http, Mover(still, modes=()) as onlooker:
            reading = asyncio.create_task(stream(http, still, prompt_text(1), max_tokens=400, ignore_eos=True))
            _, sequence = await onlooker.place()
            said = await asyncio.to_thread(still.cli, "migrate", sequence)
            assert "nobody listens (is there a broker for worker-0?)" in said
            assert not (await reading).error
    finally:
        still.stop()

    roles = ["--processes", "3", "--roles", "worker-0=prefill,worker-1=decode,worker-2=decode"]
    rig = UpRig(tmp_path / "split", model_path=model, engine="modelled", instances=3, extra=[*WORKER, *roles])
    rig.start()
    try:
        await _all_handed_over(rig, expected)
    finally:
        rig.stop()


async def _all_handed_over(rig: UpRig, expected: dict[int, tuple[str, str, int]]) -> None:
    async with Mover(rig, modes=()) as onlooker:
        results = await offer(rig, rate=6, count=30, prompts=8, **LENGTH)
        expect_identical(results, expected)
    moved = [body for body in onlooker.heard if body.outcome is MigrationOutcome.MOVED]
    assert {body.reason for body in moved} == {MoveReason.HANDOFF}
    assert {body.source for body in moved} == {"worker-0"}
    assert {body.target for body in moved} <= {"worker-1", "worker-2"}
    assert len(moved) >= 25, [(body.outcome, body.refusal, body.detail) for body in onlooker.heard]
    assert "prefill" in rig.cli("status")
