"""A supervisor that is killed leaves its cluster running; the next one takes it over, and `down` ends it."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from services.supervisor.preflight import clear_sockets
from tests.live.faults import PROMPTS, expect_identical, told, undisturbed
from tests.live.ingress_rig import write_model_folder
from tests.testbed.up_cluster import UpRig, offer_during
from tests.testbed.waiting import until

#: Longest wait for processes to end, seconds.
PATIENCE_S = 60.0


async def test_the_next_supervisor_takes_over_what_lives_no_stream_ends_and_a_closed_terminal_stops_all(
    tmp_path: Path,
) -> None:
    model = write_model_folder(tmp_path / "model")
    slow = ["--processes", "2", "--set", 'worker={"modelled": {"speed": 0.1}}']
    rig = UpRig(tmp_path / "cluster", model_path=model, engine="modelled", instances=2, extra=slow)
    rig.start()
    assert rig.process is not None
    processes, worker = rig.processes(), rig.pids("worker-0.json")
    fields = {"max_tokens": 60, "ignore_eos": True}
    expected = await undisturbed(rig, **fields)

    async def killed_and_back() -> None:
        rig.process.kill()
        rig.process.wait()
        await asyncio.to_thread(rig.start)
        assert "taking over" in rig.output()
        assert "was not stopped in order" not in rig.output()
        os.kill(worker[0], signal.SIGKILL)  # this one watches what it has not started
        await until(lambda: rig.pids("worker-0.json") not in ([], worker), PATIENCE_S, 0.05)
        await told(rig, instances_ready=2)

    expect_identical(await offer_during(rig, killed_and_back(), rate=2, prompts=PROMPTS, **fields), expected)
    rig.process.send_signal(signal.SIGHUP)
    assert await asyncio.to_thread(rig.process.wait, PATIENCE_S) == 0
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, PATIENCE_S)
    assert alive == []
    assert not list((rig.folder / "run").glob("cluster.json"))
    assert not (rig.folder / "jetstream").exists()


def test_down_ends_what_a_killed_supervisor_left_and_the_next_start_tells(tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "model")
    rig = UpRig(tmp_path / "cluster", model_path=model, engine="modelled", instances=1)
    rig.start()
    assert rig.process is not None
    # A fork server is its supervisor's alone, and ends with it.
    processes = [process for process in rig.processes() if "fork server" not in " ".join(process.cmdline())]
    left = (rig.folder / "jetstream").resolve()
    rig.process.kill()
    rig.process.wait()
    assert all(process.is_running() for process in processes)
    assert "its supervisor had been killed" in rig.cli("down")
    assert not psutil.wait_procs(processes, PATIENCE_S)[1]
    assert left.exists()
    command = [sys.executable, "-m", "millrace.cli", *rig._words, "--detach"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    try:
        assert done.stdout.startswith("note: the cluster that was started here at ")
        assert "was not stopped in order" in done.stdout
        assert not left.exists()
    finally:
        now = (rig.folder / "jetstream").resolve()
        rig.cli("down")
    assert not now.exists()


def test_sockets_that_nobody_listens_to_are_removed_once_they_are_not_new() -> None:
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as heard:
        folder = Path(short)
        heard.bind(str(folder / "heard"))
        heard.listen()
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(folder / "dead"))
        (folder / "file").touch()
        clear_sockets(folder, time.time())
        assert len(list(folder.iterdir())) == 3
        clear_sockets(folder, time.time() + 60)
        assert sorted(path.name for path in folder.iterdir()) == ["file", "heard"]
