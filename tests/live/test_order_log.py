"""Every order to a live cluster is a line in run/orders.log: who, what, when."""

from __future__ import annotations

import asyncio
import json
import stat
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.live.faults import PATIENCE_S, told
from tests.live.ingress_rig import write_model_folder
from tests.testbed.timed_streams import TimedStream, client, play
from tests.testbed.up_cluster import UpRig

WORKER = {"modelled": {"speed": 0.1}, "limits": {"linger_ms": 200}}


def lines(rig: UpRig) -> list[dict[str, Any]]:
    file = rig.folder / "run" / "orders.log"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


async def by_the_command_line(rig: UpRig, *words: str, orders: set[str]) -> list[dict[str, Any]]:
    """Carries out a verb; returns the lines of its orders, once they are all there."""
    before = len(lines(rig))
    said = await asyncio.to_thread(rig.cli, *words)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = [line for line in lines(rig)[before:] if line["who"].startswith("millrace-cli/")]
        if orders <= {line["what"] for line in found}:
            return found
        assert time.monotonic() < deadline, said
        await asyncio.sleep(0.05)


async def test_each_order_is_a_line_that_says_who_gave_it_and_a_question_is_none(tmp_path: Path) -> None:
    options = ["--processes", "2", "--instances-max", "3", "--set", "worker=" + json.dumps(WORKER)]
    model = write_model_folder(tmp_path / "model")
    with UpRig(tmp_path / "cluster", model_path=model, engine="modelled", instances=2, extra=options) as rig:
        began = datetime.now(UTC)
        async with client() as http:
            running = TimedStream(settle=8)
            streaming = asyncio.create_task(play(http, rig, running, prompt="tell", max_tokens=600, ignore_eos=True))
            await running.settled.wait()
            request = running.sequence.partition(".")[0]
            (moved,) = await by_the_command_line(rig, "migrate", request, orders={"MigrateSequence"})
            assert moved["sequence"] == running.sequence
            streaming.cancel()
            await asyncio.gather(streaming, return_exceptions=True)
        (role,) = await by_the_command_line(rig, "role", "worker-1", "decode", orders={"SetRole"})
        assert (role["instance"], role["role"], role["to"]) == ("worker-1", "decode", "coordinate.m.role")
        await by_the_command_line(rig, "drain", "worker-1", orders={"StopInstance", "EvacuateInstance"})
        await by_the_command_line(rig, "drain", "worker-1", "--back", orders={"StartInstance"})
        await told(rig, instances_ready=2)
        await by_the_command_line(rig, "scale", "m", "3", orders={"SetInstances"})
        await told(rig, instances_ready=3)
        assert ("coordinator-0", "StartInstance") in {(line["who"], line["what"]) for line in lines(rig)}
        before = lines(rig)
        await asyncio.to_thread(rig.cli, "apply", "--set", "settings.ingress.limits.calls_open_max=99", "--dry-run")
        assert lines(rig) == before, "a question is no order"
        applied = await by_the_command_line(
            rig, "apply", "--set", "settings.ingress.limits.calls_open_max=99", orders={"UpdateCluster"}
        )
        assert [line for line in applied if line.get("take")]
        for line in lines(rig):
            assert began <= datetime.fromisoformat(line["time"]) <= datetime.now(UTC), line
        assert stat.S_IMODE((rig.folder / "run" / "orders.log").stat().st_mode) == 0o600
