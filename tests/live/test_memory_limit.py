"""A control group whose memory is used up: the kernel kills a process, streams go on, and `doctor` counts the kills."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.ingress_rig import write_model_folder
from tests.testbed import programs
from tests.testbed.timed_streams import client
from tests.testbed.up_cluster import UpRig, prompt_text, stream

#: Cgroups 2 and 1: where groups are made, and the names of a limit and of what is used.
VERSIONS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)

#: What the cluster may take more than it takes once it is up, bytes.
ROOM = 128 << 20

#: Enters the group of its first argument, and takes memory until it is killed.
HOG = """
import sys; from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text("0")
held = []
while True: held.append(b"x" * (1 << 20))
"""

TOKENS = 100


class MemoryGroup:
    """A control group of the test's own."""

    def __init__(self) -> None:
        for root, self._limit, self._used in VERSIONS:
            self.folder = root / f"millrace-test-{os.getpid()}"
            if not (root / self._limit).exists() and not (root / "cgroup.controllers").exists():
                continue
            try:
                self.folder.mkdir()
                (self.folder / self._limit).write_text(str(64 << 30))
                return
            except OSError:
                if self.folder.is_dir():
                    self.folder.rmdir()
        pytest.skip("no control group with a memory limit can be made here")

    def enter(self) -> None:
        (self.folder / "cgroup.procs").write_text("0")

    def limit(self, room: int) -> None:
        """So much more than is used now."""
        (self.folder / self._limit).write_text(str(int((self.folder / self._used).read_text()) + room))

    def close(self) -> None:
        for pid in (self.folder / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        self.folder.rmdir()


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    made = MemoryGroup()
    yield made
    made.close()


@pytest.fixture
def rig(group: MemoryGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[UpRig]:
    monkeypatch.setattr(programs, "_servers", [])  # a process that is forked elsewhere would not be in the group
    model = write_model_folder(tmp_path / "model")
    before = Path("/proc/self/cgroup").read_text().splitlines()
    rig = UpRig(tmp_path / "c", model_path=model, engine="modelled", instances=2, extra=("--processes", "2"))
    group.enter()
    try:
        rig.start()
    finally:
        _back(group, before)
    group.limit(ROOM)
    yield rig
    rig.stop()


def _back(group: MemoryGroup, before: list[str]) -> None:
    """This process into the group from which it came."""
    path = next(line.split(":")[2] for line in before if line.split(":")[1] in ("", "memory"))
    (group.folder.parent / path.lstrip("/") / "cgroup.procs").write_text("0")


async def use_up(group: MemoryGroup) -> None:
    """A process of the group takes all that is left."""
    hog = await asyncio.create_subprocess_exec(sys.executable, "-c", HOG, str(group.folder))
    assert await asyncio.wait_for(hog.wait(), 60) == -signal.SIGKILL


def offer_to_kernel(pid: int) -> None:
    """Of all processes the kernel kills this one first."""
    Path(f"/proc/{pid}/oom_score_adj").write_text("1000")


async def test_what_the_kernel_kills_for_memory_comes_back_and_no_stream_ends(rig: UpRig, group: MemoryGroup) -> None:
    for name in ("worker-0", "coordinator-0", "migrator-0", "nats"):
        (victim,) = rig.log_pids(name)[:1]
        offer_to_kernel(victim)
        async with client(120) as http:
            asked = (stream(http, rig, prompt_text(n), max_tokens=TOKENS, ignore_eos=True) for n in range(4))
            tasks = [asyncio.create_task(each) for each in asked]
            await use_up(group)
            assert victim not in rig.log_pids(name), name
            assert [(each.tokens, each.error) for each in await asyncio.gather(*tasks)] == [(TOKENS, "")] * 4, name
        await rig.well(2, limit_s=60)
    assert "process(es) of this control group" in rig.cli("doctor", "--dir", str(rig.folder))
