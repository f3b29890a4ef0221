"""systemd itself runs the unit that `millrace service install` writes."""

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.faults import PROMPTS, expect_identical, undisturbed
from tests.live.ingress_rig import write_model_folder
from tests.testbed.programs import environment
from tests.testbed.systemd_machine import NAMESPACES, PROGRAM, SystemdMachine, groups
from tests.testbed.up_cluster import UpRig, offer_during
from tests.testbed.waiting import until

FIELDS = {"max_tokens": 120, "ignore_eos": True}


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[SystemdMachine]:
    if not (PROGRAM.exists() and shutil.which("nsenter") and groups()):
        pytest.skip("no systemd is installed here, or there are no control groups of version 2")
    if subprocess.run([*NAMESPACES, "true"], check=False, capture_output=True).returncode:
        pytest.skip("namespaces of one's own are not allowed here")
    with SystemdMachine(tmp_path, {"PYTHONPATH": f"{Path.cwd()}/libs:{Path.cwd()}"}) as machine:
        yield machine


async def test_a_killed_supervisor_is_started_again_by_another_environment_and_one_that_was_told_to_end_is_not(
    tmp_path: Path, machine: SystemdMachine
) -> None:
    model = write_model_folder(tmp_path / "model")
    options = ["--processes", "2", "--set", 'worker={"modelled": {"speed": 0.1}}']
    rig = UpRig(tmp_path / "cluster", model_path=model, engine="modelled", instances=2, extra=options)
    python = environment(tmp_path / "environment")

    def install(program: Path) -> None:
        words = ["cluster" if word == str(rig.folder) else word for word in rig._words[1:]]
        machine.run(program, "-m", "millrace.cli", "service", "install", *words, folder=tmp_path)
        machine.run("systemctl", "daemon-reload")

    def unit(verb: str, *words: str) -> str:
        return machine.run("systemctl", verb, *words, "millrace").strip()

    def processes(pattern: str) -> list[str]:
        return machine.run("pgrep", "-f", pattern, check=False).split()

    show = ("show", "--value", "-p")
    install(Path(sys.executable))
    unit("start")  # returns once it serves
    expected = await undisturbed(rig, **FIELDS)

    async def replaced() -> None:
        (worker,) = processes("worker-0.json")
        install(python)
        unit("kill", "--kill-whom=main", "--signal=KILL")
        await until(lambda: processes(f"{python} -m deployment.local_supervisor"), look_s=0.1)
        assert processes("worker-0.json") == [worker]
        machine.run("kill", "-9", worker)  # it watches what it has not started
        await until(lambda: processes("worker-0.json") not in ([], [worker]), look_s=0.1)
        await rig.well(2)
        await asyncio.to_thread(machine.run, python, "-m", "millrace.cli", "upgrade", "--dir", rig.folder)
        await until(lambda: not processes(f"^{sys.executable}"), look_s=0.1)  # ingress ends with its last stream

    expect_identical(await offer_during(rig, replaced(), rate=2, prompts=PROMPTS, **FIELDS), expected)
    assert "taking over" in machine.run("journalctl", "-u", "millrace")
    machine.run(python, "-m", "millrace.cli", "down", "--dir", rig.folder)
    await until(lambda: unit(*show, "ActiveState") == "inactive", look_s=0.1)
    unit("start")
    unit("stop")
    assert unit(*show, "Result") == "success"
    assert processes(str(rig.folder)) == []
    assert "was not stopped in order" not in machine.run("journalctl", "-u", "millrace")
