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
import pytest
from millrace.supervision.survivors import survivors

from services.supervisor.preflight import clear_sockets
from tests.live.faults import PROMPTS, expect_identical, told, undisturbed
from tests.live.ingress_rig import write_model_folder
from tests.testbed.programs import environment
from tests.testbed.up_cluster import UpRig, offer_during
from tests.testbed.waiting import until

#: Longest wait for processes to end, seconds.
PATIENCE_S = 60.0


async def test_a_supervisor_of_another_environment_takes_over_and_replaces_all_and_cuts_no_stream(
    tmp_path: Path,
) -> None:
    """Three NATS servers, services and workers; then nats-server is replaced in place, and a terminal closes."""
    model = write_model_folder(tmp_path / "model")
    options = ["--processes", "2", "--set", "nats.servers=3", "--set", 'worker={"modelled": {"speed": 0.1}}']
    rig = UpRig(tmp_path / "cluster", model_path=model, engine="modelled", instances=2, extra=options)
    rig.start()
    assert rig.process is not None
    python = environment(tmp_path / "environment")
    fields = {"max_tokens": 60, "ignore_eos": True}
    expected = await undisturbed(rig, **fields)

    def known() -> dict[str, tuple[int, str]]:
        return {each.spec["name"]: (each.pid, each.spec["command"][0]) for each in survivors(rig.folder)}

    async def replaced() -> set[str]:
        before = known()
        said = await asyncio.to_thread(rig.cli, "apply", limit_s=200)
        assert "the cluster is as the file says" in said
        return {name for name, process in known().items() if before.get(name) != process}

    async def upgraded() -> None:
        await asyncio.to_thread(rig.start, "--take-over", python=python)
        assert "taking over" in rig.output()
        assert "was not stopped in order" not in rig.output()
        worker = known()["worker-0"]
        os.kill(worker[0], signal.SIGKILL)  # this one watches what it has not started
        await until(lambda: known().get("worker-0", worker) != worker, PATIENCE_S, 0.05)
        await told(rig, instances_ready=2)
        assert await replaced() == known().keys() - {"worker-0"}
        assert {Path(program).parent for _, program in known().values()} == {python.parent}
        os.utime(python.with_name("nats-server"))
        assert await replaced() == {"nats-0", "nats-1", "nats-2"}

    expect_identical(await offer_during(rig, upgraded(), rate=2, prompts=PROMPTS, **fields), expected)
    processes = rig.processes()
    rig.process.send_signal(signal.SIGHUP)
    assert await asyncio.to_thread(rig.process.wait, PATIENCE_S) == 0
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, PATIENCE_S)
    assert alive == []
    assert not list((rig.folder / "run").glob("cluster.json"))
    assert not (rig.folder / "jetstream").exists()


async def test_an_upgrade_whose_workers_do_not_start_goes_back_and_a_good_one_replaces_all(tmp_path: Path) -> None:
    options = ["--processes", "2", "--set", 'worker={"modelled": {"speed": 0.1}}']
    model = write_model_folder(tmp_path / "model")
    rig = UpRig(tmp_path / "cluster", model_path=model, engine="modelled", instances=2, extra=options)
    rig.start()
    fields = {"max_tokens": 60, "ignore_eos": True}
    expected = await undisturbed(rig, **fields)

    async def upgraded(python: Path) -> tuple[int, str]:
        words = [str(python), "-m", "millrace.cli", "upgrade", "--dir", str(rig.folder)]
        done = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, timeout=300, check=False)
        stay = [each for each in survivors(rig.folder) if not each.retiring]
        programs = {Path(each.spec["command"][0]).parent for each in stay}
        assert programs == {Path(sys.executable if done.returncode else python).parent}, done
        return done.returncode, done.stdout + done.stderr

    async def both() -> None:
        code, said = await upgraded(environment(tmp_path / "bad", without="services.worker.build"))
        assert (code, "worker-0 does not start" in said, "as it was before" in said) == (1, True, True), said
        assert "worker-1 drains" not in said
        await told(rig, instances_ready=2)
        assert (await upgraded(environment(tmp_path / "good")))[0] == 0

    try:
        expect_identical(await offer_during(rig, both(), rate=2, prompts=PROMPTS, **fields), expected)
    finally:
        assert "the cluster is down" in rig.cli("down")


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_end_waits_for_no_imports(tmp_path: Path, number: int) -> None:
    """Those of vLLM take seconds. Here services wait for a worker that does not end."""
    rig = UpRig(tmp_path / "cluster", model_path=write_model_folder(tmp_path / "model"), engine="modelled", instances=1)
    with rig:
        assert rig.process is not None
        servers = [each for each in rig.processes() if "fork server" in " ".join(each.cmdline())]
        (worker,), (nats,) = rig.pids("worker-0.json"), rig.pids("nats-server")
        os.kill(worker, signal.SIGSTOP)
        rig.process.send_signal(number)
        assert not psutil.wait_procs(servers, PATIENCE_S)[1]
        assert psutil.pid_exists(nats), "the cluster ended before they did"
        os.kill(worker, signal.SIGCONT)


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
