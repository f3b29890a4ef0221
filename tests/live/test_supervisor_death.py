"""A supervisor that is killed takes its cluster along; open streams end at once, and the next start says so."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from services.supervisor.preflight import clear_sockets
from tests.live.faults import told
from tests.live.ingress_rig import write_model_folder
from tests.testbed.timed_streams import client
from tests.testbed.up_cluster import UpRig, prompt_text, stream

#: Ingress drains for 30 s (``limits.drain_s``) where it is asked to stop; here there is nothing to drain for.
PATIENCE_S = 20.0


async def test_open_streams_end_at_once_with_an_error_and_the_next_start_tells_what_happened(tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "model")
    slow = ["--set", 'worker={"modelled": {"speed": 0.1}}']  # minutes for the stream below
    rig = UpRig(tmp_path / "cluster", model_path=model, engine="modelled", instances=1, extra=slow)
    rig.start()
    assert rig.process is not None
    processes = rig.processes()
    async with client(60) as http:
        open_stream = asyncio.create_task(stream(http, rig, prompt_text(1), max_tokens=1800, ignore_eos=True))
        await told(rig, running=1)
        rig.process.kill()
        result = await asyncio.wait_for(open_stream, PATIENCE_S)
    assert "supervisor has died" in result.error
    gone, alive = await asyncio.to_thread(psutil.wait_procs, processes, PATIENCE_S)
    assert (len(gone), alive) == (len(processes), [])
    rig.process.wait()
    rig.start()
    try:
        assert "was not stopped in order" in rig.output()
    finally:
        rig.stop()
    assert not (rig.folder / "run" / "cluster.json").exists()


def test_a_start_in_the_background_tells_what_happened_too_and_finds_what_was_left(tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "model")
    rig = UpRig(tmp_path / "cluster", model_path=model, engine="modelled", instances=1)
    rig.start()
    assert rig.process is not None
    processes = rig.processes()
    left = (rig.folder / "jetstream").resolve()
    rig.process.kill()
    rig.process.wait()
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
