"""The verbs that look on, against a real nats-server with the permissions of a real cluster."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from millrace.contracts.catalog import Role
from millrace.contracts.codec import encode
from nats.aio.client import Client

from tests.live.role_users import PASSWORDS, SUBJECTS, connected, role_server
from tests.testbed.messages import decision
from tests.testbed.nats_process import NatsProcess
from tests.testbed.up_cluster import free_port


def observed(folder: Path) -> NatsProcess:
    """nats-server with per-role users and a cluster file beside it, as the supervisor leaves them."""
    server = role_server(folder)
    server.start()
    known = {
        "cluster": "local",
        "nats_url": server.url,
        "observer_user": "observer",
        "observer_password": PASSWORDS[Role.OBSERVER],
        "ingress_url": "http://127.0.0.1:8000",
    }
    (folder / ".millrace" / "run").mkdir(parents=True)
    (folder / ".millrace" / "run" / "cluster.json").write_text(json.dumps(known))
    return server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of such a cluster."""
    folder = tmp_path_factory.mktemp("observed")
    server = observed(folder)
    yield folder
    server.close()


@asynccontextmanager
async def millrace(folder: Path, *words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command as a person in the cluster's folder runs it; ended here if it has not ended by itself."""
    environment = {key: value for key, value in os.environ.items() if key != "MILLRACE_DIR"} | {"PYTHONUNBUFFERED": "1"}
    command, pipe = [sys.executable, "-m", "millrace.cli", *words], asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, cwd=folder, env=environment, stdout=pipe, stderr=pipe)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def output(folder: Path, *words: str) -> tuple[int, str, str]:
    async with millrace(folder, *words) as process:
        out, error = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode is not None
        return process.returncode, out.decode(), error.decode()


async def decide(client: Client) -> None:
    """Ten decisions a second, until cancelled: the tap need not be waited for."""
    for index in range(10_000):
        body = decision(f"r{index}")
        headers = {"Mr-Type": body.type_name(), "Mr-Sender": "ingress-0"}
        await client.publish(SUBJECTS.decision("tiny"), encode(body), headers=headers)
        await asyncio.sleep(0.1)


@asynccontextmanager
async def decisions(server: NatsProcess) -> AsyncIterator[None]:
    async with connected(server.url, Role.INGRESS) as client:
        task = asyncio.create_task(decide(client))
        try:
            yield
        finally:
            task.cancel()


async def test_tap_survives_a_restart_of_the_server(tmp_path: Path) -> None:
    server = observed(tmp_path)
    try:
        async with millrace(tmp_path, "tap", "decision.>") as tap:
            assert tap.stdout is not None
            assert tap.stderr is not None
            async with decisions(server):
                await asyncio.wait_for(tap.stdout.readline(), 20)
            server.close()
            assert b"the NATS server is gone" in await asyncio.wait_for(tap.stderr.readline(), 20)
            server.start()
            assert b"it is back" in await asyncio.wait_for(tap.stderr.readline(), 20)
            async with decisions(server):
                # Lines from before the restart may still wait in the pipe; new ones start at r0 again.
                line = b""
                while b" r0 " not in line:
                    line = await asyncio.wait_for(tap.stdout.readline(), 20)
                    assert line
    finally:
        server.close()


async def test_a_wrong_password_and_a_missing_server_are_one_sentence(folder: Path) -> None:
    code, _, error = await output(folder, "tap", "--password", "wrong")
    assert code == 1
    assert "refuses user observer" in error
    code, _, error = await output(folder, "status", "--nats", f"nats://127.0.0.1:{free_port()}")
    assert code == 1
    assert "no NATS server answers at" in error
    assert error.count("\n") == 1


async def test_a_subject_that_one_may_not_read_is_refused_not_silent(folder: Path) -> None:
    code, _, error = await output(folder, "tap", "mr.other.>")
    assert code == 1
    assert "does not let user observer read mr.other.>" in error


async def test_top_without_a_terminal_says_what_to_use_instead(folder: Path) -> None:
    code, _, error = await output(folder, "top")
    assert code == 1
    assert "millrace status --json" in error
