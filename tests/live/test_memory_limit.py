"""A control group whose memory is used up: a worker that the kernel kills for it costs no stream, and supervisor and
doctor say what killed it.
"""

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from millrace.hosting.control_groups import MEMORY_GROUPS

from tests.live.faults import PROMPTS, expect_identical, undisturbed
from tests.live.ingress_rig import write_model_folder
from tests.testbed.up_cluster import UpRig, offer_during

FIELDS = {"max_tokens": 120, "ignore_eos": True}

#: Takes memory of its group until the kernel has killed another process for it, or this one with it: its own page may
#: be asked for again before the other's are free.
NEIGHBOUR = """
import os, sys
from pathlib import Path
Path(sys.argv[1]).write_text(str(os.getpid()))
taken = []
while "oom_kill 0" in Path(sys.argv[2]).read_text().splitlines():
    taken.append(b"x" * (1 << 20))
"""


@pytest.fixture
def group() -> Iterator[list[Path]]:
    """Files of a control group of its own: of its processes, limit, use and events."""
    places = [place for place in MEMORY_GROUPS.values() if Path(place[0], "cgroup.procs").exists()]
    root, *names = places[-1] if places else ("/proc", "none")
    folder = Path(root) / f"millrace{os.getpid()}"
    try:
        folder.mkdir()
        (folder / names[0]).stat()
    except OSError as error:
        if folder.exists():
            folder.rmdir()
        pytest.skip(f"control groups of memory cannot be made here: {error}")
    procs = folder / "cgroup.procs"
    yield [procs, *(folder / name for name in names)]
    while procs.read_text():  # a process takes a moment to leave
        time.sleep(0.05)
    folder.rmdir()


async def test_a_worker_that_the_kernel_kills_for_memory_costs_no_stream(tmp_path: Path, group: list[Path]) -> None:
    procs, limit, use, events = group
    within = tmp_path / "python"
    within.write_text(f'#!/bin/sh\necho $$ > {procs}\nexec {sys.executable} "$@"\n')
    within.chmod(0o755)
    words = ("--processes", "2", "--set", "services.hosted_instances_max=0", "--set", "worker.modelled.speed=0.3")
    model = write_model_folder(tmp_path / "model")
    rig = UpRig(tmp_path / "c", model_path=model, engine="modelled", instances=2, extra=words)
    try:
        rig.start(python=within)
        expected = await undisturbed(rig, **FIELDS)

        async def squeezed() -> None:
            (victim,) = rig.log_pids("worker-0")
            await asyncio.to_thread(Path(f"/proc/{victim}/oom_score_adj").write_text, "1000")
            limit.write_text(str(int(use.read_text()) + (64 << 20)))
            command = [sys.executable, "-c", NEIGHBOUR, str(procs), str(events)]
            await asyncio.to_thread(subprocess.run, command, check=False, timeout=60)
            await rig.well(2)
            assert rig.log_pids("worker-0") != [victim]
            said = await asyncio.to_thread(rig.cli, "doctor")
            assert f"{int(limit.read_text()) / 2**30:.1f} GiB, the limit of the control group" in said
            assert re.search("the kernel killed [12] process.es. of this control group", said), said

        expect_identical(await offer_during(rig, squeezed(), rate=6.0, prompts=PROMPTS, **FIELDS), expected)
        log = (rig.folder / "logs" / "supervisor.log").read_text()
        assert re.search("by SIGKILL; the kernel killed [12] process.es. for the memory limit of the control", log)
    finally:
        rig.stop()
