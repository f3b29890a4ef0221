"""Real engines replaced under load by `millrace apply`, and a supervisor that is killed beside them."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.live.faults import PROMPTS, expect_identical, told, undisturbed
from tests.testbed.up_cluster import UpRig, offer_during

LENGTH = {"max_tokens": 400, "ignore_eos": True}


async def applied(rig: UpRig, file: Path, text: str) -> None:
    await asyncio.to_thread(file.write_text, text)
    said = await asyncio.to_thread(rig.cli, "apply", str(file))
    print(said)
    assert said.splitlines()[-1].endswith("the cluster is as the file says"), said


@pytest.mark.timeout(400)
async def test_flags_and_environment_of_engines_change_under_load(rig: UpRig, tmp_path: Path) -> None:
    before = await asyncio.to_thread(rig.cli, "cluster", "show")
    flags = before.replace("enable_prefix_caching = false", "enable_prefix_caching = false\nmax_num_seqs = 32")
    environment = flags.replace("[[models.groups]]", f'[[models.groups]]\npython = "{sys.executable}"')
    assert before != flags != environment
    expected = await undisturbed(rig, **LENGTH)

    async def changes() -> None:
        await applied(rig, tmp_path / "cluster.toml", flags)
        await applied(rig, tmp_path / "cluster.toml", environment)
        await applied(rig, tmp_path / "cluster.toml", before)

    results = await offer_during(rig, changes(), rate=3, prompts=PROMPTS, **LENGTH)
    pauses = sorted(result.pause_s for _, result in results)
    print(
        f"{len(results)} streams, pause p50 {pauses[len(pauses) // 2]:.2f} p99 {pauses[-1 - len(pauses) // 100]:.2f} s"
    )
    expect_identical(results, expected)
    await told(rig, instances_ready=2, running=0)


async def test_the_supervisor_is_killed_and_the_next_one_takes_real_engines_over(rig: UpRig) -> None:
    expected = await undisturbed(rig, **LENGTH)

    async def killed_and_back() -> None:
        assert rig.process is not None
        rig.process.kill()
        rig.process.wait()
        await asyncio.to_thread(rig.start)
        assert "taking over" in rig.output()

    expect_identical(await offer_during(rig, killed_and_back(), rate=3, prompts=PROMPTS, **LENGTH), expected)
    await told(rig, instances_ready=2, running=0)
