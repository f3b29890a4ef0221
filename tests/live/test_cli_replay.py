"""Replay of an actor recorded live on a real bus: same inbox, same effects."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nats
import pytest
from millrace.actor.recording import Handled, RecordingReader
from millrace.contracts.codec import decode, encode
from millrace.contracts.status import StatusSnapshot
from millrace.contracts.subjects import Subjects
from millrace.contracts.tagger import TagRequest
from millrace.contracts.worker import Sampling, SequenceAccepted, SubmitSequence
from nats.aio.client import Client

from tests.testbed.nats_process import NatsProcess

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE_S = 30.0
SECRET = "hush-and-hush"
TRACE = f"00-{'a' * 32}-{'b' * 16}-01"


class Service:
    """One service process that records its actor."""

    def __init__(self, folder: Path, noun: str, config: dict[str, Any]) -> None:
        self.recording = folder / f"{noun}.rec"
        self._log = folder / f"{noun}.log"
        file = folder / f"{noun}.json"
        file.write_text(json.dumps(config | {"record": str(self.recording)}))
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"services.{noun}", "--config", file], cwd=REPOSITORY, stdout=log, stderr=log
            )

    def stop(self) -> None:
        """SIGTERM: it drains, leaves and closes its recording."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(timeout=PATIENCE_S)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(timeout=10)


def replay(recording: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "millrace.cli", "replay", str(recording)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


async def ask(client: Client, subject: str, payload: bytes) -> Any:
    """Asks until somebody is there to answer."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            reply = await client.request(
                subject, payload, timeout=5, headers={"Mr-Sender": "ingress-0", "traceparent": TRACE}
            )
            return decode(reply.data)
        except nats.errors.NoRespondersError:
            await asyncio.sleep(0.05)
    raise TimeoutError(f"nobody answers on {subject}")


async def until_idle_after_work(client: Client, subjects: Subjects) -> None:
    """Waits for a snapshot that has nothing left to compute, after one that had."""
    subscription = await client.subscribe(subjects.status("tiny", "w0"))
    worked = False
    while True:
        body = decode((await subscription.next_msg(timeout=PATIENCE_S)).data)
        assert isinstance(body, StatusSnapshot)
        worked = worked or bool(body.running) or body.step > 0
        if worked and not body.running and not body.waiting:
            return


@pytest.mark.timeout(180)
async def test_recorded_live_actors_replay_without_a_difference(nats_server: NatsProcess, tmp_path: Path) -> None:
    cluster = "replayed"
    bus = {"cluster": cluster, "servers": [nats_server.url], "user": "someone", "password": SECRET}
    subjects = Subjects(cluster)
    tagger = Service(tmp_path, "tagger", {"name": "tagger-0", "bus": bus})
    worker = Service(tmp_path, "worker", {"name": "w0", "model": "tiny", "engine": "modelled", "bus": bus})
    client = await nats.connect(nats_server.url)
    try:
        for index in range(5):
            question = TagRequest(request=f"r{index}", model="tiny", prompt_tokens=9, max_tokens=20)
            await ask(client, subjects.tag("tiny"), encode(question))
            submit = SubmitSequence(
                sequence=f"r{index}.0",
                epoch=0,
                ingress="ingress-0",
                ingress_incarnation=1,
                prompt_token_ids=list(range(50)),
                sampling=Sampling(max_tokens=20),
            )
            answer = await ask(client, subjects.engine("w0", "submit"), encode(submit))
            assert isinstance(answer, SequenceAccepted)
        await client.publish(subjects.engine("w0", "submit"), b"\xc1 no message")
        await until_idle_after_work(client, subjects)
        tagger.stop()
        worker.stop()
    finally:
        await client.close()
        tagger.close()
        worker.close()
    for service in (tagger, worker):
        handled = [frame for frame in RecordingReader(service.recording) if isinstance(frame, Handled)]
        assert len(handled) > 5
        done = replay(service.recording)
        assert (done.returncode, done.stderr) == (0, "")
        assert "no differences in effects" in done.stdout
        assert SECRET.encode() not in service.recording.read_bytes()
