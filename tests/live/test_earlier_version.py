"""One service of an earlier version beside a cluster of this one: requests are served and moved, and none is lost."""

from __future__ import annotations

import asyncio
import copy
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.live import faults
from tests.live.clusters import modelled_cluster
from tests.live.faults import PATIENCE_S, PROMPTS, expect_identical, expected_outcomes, told
from tests.testbed.timed_streams import client, until_answered
from tests.testbed.up_cluster import UpRig, free_port, prompt_text, stream
from tests.testbed.waiting import until

#: The last release; before the first one a commit that people may run.
EARLIER = "a3710868"
ROOT = Path(__file__).resolve().parent.parent.parent

#: Some 10 s a stream.
LENGTH = {"max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code of then, with the compiled modules of now."""
    what = ("libs", "services", "deployment", "papers")
    archive = subprocess.run(["git", "archive", EARLIER, *what], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"{EARLIER} is not in the history of this clone")
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    native = Path("libs/millrace/native.py")
    (folder / native).write_text((ROOT / native).read_text())
    return folder


class Beside:
    """Processes beside a cluster, configured as its own: ``role`` is of ``code``, the folder of the earlier version."""

    def __init__(self, rig: UpRig, code: Path, role: str) -> None:
        self._rig, self._code, self._role = rig, code, role
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, role: str, name: str, module: str, *hosted: str, **fields: Any) -> None:
        """Starts ``name``, and the services that it hosts, with the configuration of the first of their roles."""
        words = ["--config", self._config(role, name, fields)]
        words += [word for host in hosted for word in (f"--{host}", self._config(host, f"{host}-{name}", fields))]
        code = self._code if role == self._role else ROOT
        environment = os.environ | {"PYTHONPATH": f"{code / 'libs'}:{code}"}
        with (self._rig.folder / "logs" / f"{name}.log").open("wb") as log:
            command = [sys.executable, "-m", module, *words]
            self._running.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=code))

    def _config(self, role: str, name: str, fields: dict[str, Any]) -> str:
        folder = self._rig.folder / "run"
        known = json.loads((folder / f"{role}-0.json").read_text())
        known["telemetry"]["metrics_port"] = free_port()
        (folder / f"{name}.json").write_text(json.dumps(known | {"name": name} | fields))
        return str(folder / f"{name}.json")

    def end(self) -> None:
        for process in self._running:
            process.terminate()
        for process in self._running:
            process.wait(timeout=PATIENCE_S)


rig = modelled_cluster("--processes", "2", worker={"modelled": {"speed": 0.1}, "max_num_seqs": 12})


async def moved(rig: UpRig, instance: str) -> int:
    """Empties an instance, which goes on; returns how many sequences moved."""
    said = await asyncio.to_thread(rig.cli, "drain", instance, "--keep", "--within", "20")
    found = re.search(rf"{instance}: (\d+) moved", said)
    assert found is not None, said
    return int(found.group(1))


async def until_placed(rig: UpRig, instance: str) -> None:
    """Waits until ingress gives an instance requests: it may hear of a new one later than the command line does."""

    async def dispatches() -> float:
        return await rig.metric("millrace_ingress_dispatches_total", f'instance="{instance}"')

    before = await dispatches()

    async def placed() -> bool:
        await asyncio.gather(*(faults.asked(rig) for _ in range(PROMPTS)))
        return await dispatches() > before

    await until(placed, PATIENCE_S)


@pytest.mark.parametrize("role", ["worker", "migrator", "ingress"])
async def test_a_service_of_an_earlier_version_serves_beside_present_ones(rig: UpRig, earlier: Path, role: str) -> None:
    """Brokers, which migrators host, have numbered their loads anew since then: they refuse each other's, say so, and
    nothing moves to or from theirs.
    """
    await rig.well(2)
    expected = await expected_outcomes(rig, **LENGTH)
    log = rig.folder / "logs" / "migrator-0.log"
    said_before = len(log.read_text())
    beside, asked = Beside(rig, earlier, role), copy.copy(rig)
    try:
        beside.start("worker", "worker-2", "services.worker")
        beside.start("migrator", "migrator-2", "deployment.migrator", "broker", instances=["worker-2"])
        if role == "ingress":
            asked.port = free_port()
            asked.url = f"http://127.0.0.1:{asked.port}"
            beside.start(role, "ingress-1", "deployment.ingress", http={"host": "127.0.0.1", "port": asked.port})
        await rig.well(3)
        await until_answered(f"{asked.url}/ready", 2 * PATIENCE_S)
        await until_placed(asked, "worker-2")
        async with client(120) as http:
            streams = [stream(http, asked, prompt_text(number), **LENGTH) for number in range(PROMPTS)]
            running = [asyncio.create_task(each) for each in streams]
            await told(rig, running=PROMPTS)
            moves = await moved(rig, "worker-2")
            await moved(rig, "worker-0")
            results = [await each for each in running]
        expect_identical(list(enumerate(results)), expected)
        refused = re.search("message_refused .*LoadReported/1", log.read_text()[said_before:])
        assert (moves > 0, refused is not None) == (role != "migrator", role == "migrator"), rig.logs()
    finally:
        beside.end()
