"""A cluster whose disk is full: requests go on through kills, status names the disk, and an ill store gets well."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.faults import asked, until_served
from tests.live.ingress_rig import write_model_folder
from tests.testbed.up_cluster import UpRig


class SmallDisk:
    """A file system of a few MB."""

    def __init__(self, folder: Path, size: str = "32m") -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=False, capture_output=True
        )
        if done.returncode:
            pytest.skip(f"mounting is not allowed here: {done.stderr.decode().strip()}")

    def fill(self) -> None:
        """Takes the last byte."""
        with (self.folder / "junk").open("ab", buffering=0) as junk:
            for piece in (b"x" * 65536, b"x"):
                try:
                    while True:
                        junk.write(piece)
                except OSError:
                    continue

    def free(self) -> None:
        (self.folder / "junk").unlink()

    def close(self) -> None:
        subprocess.run(["umount", "-l", self.folder], check=True)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallDisk]:
    made = SmallDisk(tmp_path_factory.mktemp("full") / "disk")
    yield made
    made.close()


@pytest.fixture(scope="module")
def rig(disk: SmallDisk) -> Iterator[UpRig]:
    model = write_model_folder(disk.folder.parent / "model")
    # A request that had to wait for an instance would run into its client's timeout.
    patience = ("--set", "ingress.dispatch.wait_s=600")
    with UpRig(disk.folder / "c", model_path=model, engine="modelled", instances=2, extra=patience) as made:
        yield made


def kill(rig: UpRig, what: str) -> None:
    for pid in rig.log_pids(what)[:1] if what.startswith("worker-") else rig.pids(what):
        os.kill(pid, signal.SIGKILL)


async def test_requests_go_on_through_kills_and_status_names_the_disk(rig: UpRig, disk: SmallDisk) -> None:
    disk.fill()
    await rig.until_said(lambda said: f"no space is left for {rig.folder}" in said)
    for what in ("worker-0", "deployment.migrator", "services.coordinator", "nats-server"):
        kill(rig, what)
        await asyncio.sleep(1)
        for _ in range(5):
            status, text = await asked(rig)
            assert status == 200, (what, text)
    disk.free()
    await rig.until_said(lambda said: "no space" not in said)
    assert (await asked(rig))[0] == 200


async def test_an_ill_store_s_requests_go_on_or_are_refused_at_once_and_it_gets_well_with_room(rig: UpRig) -> None:
    small = SmallDisk((rig.folder / "jetstream").resolve(), size="32m")  # over the store: the next server writes there
    try:
        kill(rig, "nats-server")
        await asyncio.sleep(1)
        await until_served(rig)
        small.fill()
        await rig.until_said(lambda said: "JetStream takes no writes" in said)
        for what in ("worker-0", "worker-1", "services.coordinator", "nats-server"):
            kill(rig, what)
            await asyncio.sleep(1)
            status, text = await asked(rig)
            refused = "none can register: JetStream takes no writes (no space left on device)" in text
            assert status == 200 or refused, (what, text)
        small.free()
        await rig.until_said(lambda said: "JetStream" not in said)
        await until_served(rig)
    finally:
        small.close()
