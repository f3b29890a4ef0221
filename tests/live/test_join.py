"""Another machine's engines join a running cluster over TLS, are cut off, come back, and leave; no stream is lost. An
ingress there is cut off from NATS for longer than workers wait for it.

The other machine is a network namespace with a host name of its own, behind a cable of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from millrace.cli.__main__ import main
from millrace.supervision.joining import TOKEN

from tests.live.faults import PROMPTS, expect_identical, told, undisturbed
from tests.live.ingress_rig import write_model_folder
from tests.testbed.timed_streams import TimedStream, client, play, until_answered
from tests.testbed.up_cluster import UpRig, offer_during, prompt_text
from tests.testbed.waiting import until

HERE, THERE = "10.231.77.1", "10.231.77.2"
NAME = f"millrace{os.getpid()}"
CABLE = f"mr{os.getpid()}"
FIELDS = {"max_tokens": 250, "ignore_eos": True}


def _ip(*words: str) -> int:
    return subprocess.run(["ip", *words], check=False, capture_output=True).returncode


def _drops(chain: str, which: str = "") -> list[tuple[str, ...]]:
    """Words of `ip`: the other machine drops TCP packets, those that are named; and no more."""
    rule = (chain, "-p", "tcp", *which.split(), "-j", "DROP")
    return [("netns", "exec", NAME, "iptables", verb, *rule) for verb in ("-A", "-D")]


#: The other machine is heard, and hears nothing. Every fifth packet is lost, each way.
DEAF = _drops("INPUT")
LOSSY = [_drops(chain, "-m statistic --mode random --probability 0.2") for chain in ("INPUT", "OUTPUT")]


@pytest.fixture
def machine() -> Iterator[list[str]]:
    """Words before a command that run it on the other machine."""
    if not shutil.which("ip") or not shutil.which("iptables") or _ip("netns", "add", NAME):
        pytest.skip("network namespaces are not allowed here, or there is no `ip` or `iptables`")
    try:
        assert not _ip("link", "add", CABLE, "type", "veth", "peer", "name", "cable", "netns", NAME)
        assert not _ip("addr", "add", f"{HERE}/30", "dev", CABLE) + _ip("link", "set", CABLE, "up")
        assert not _ip("-n", NAME, "addr", "add", f"{THERE}/30", "dev", "cable")
        assert not _ip("-n", NAME, "link", "set", "cable", "up") + _ip("-n", NAME, "link", "set", "lo", "up")
        yield ["ip", "netns", "exec", NAME, "unshare", "--uts", "sh", "-c", 'hostname other && exec "$@"', "sh"]
    finally:
        found = subprocess.run(["ip", "netns", "pids", NAME], check=False, capture_output=True, text=True).stdout
        for pid in found.split():
            os.kill(int(pid), signal.SIGKILL)
        _ip("link", "del", CABLE)
        _ip("netns", "del", NAME)


async def test_a_machine_that_joins_is_cut_off_and_leaves_costs_no_stream(tmp_path: Path, machine: list[str]) -> None:
    model, certificates = write_model_folder(tmp_path / "model"), tmp_path / "certs"
    assert main(["certs", str(certificates), "--host", HERE]) == 0
    extra = ("--set", f"nats.host={HERE}", "--set", f"nats.tls={certificates}")
    with UpRig(tmp_path / "c", model_path=model, engine="modelled", instances=2, extra=extra) as rig:
        token = rig.folder / "run" / TOKEN
        assert token.stat().st_mode & 0o777 == 0o600
        assert f"millrace join nats://{HERE}:" in rig.output()
        words = [rig.cluster_file()["nats_url"], "--token", f"@{token}", "--dir", str(tmp_path / "there")]
        words += ["--model", str(model), "--served-name", "m", "--engine", "modelled", "--instances", "2"]
        words += ["--processes", "2", "--instances-max", "3", *extra[2:]]
        expected = await undisturbed(rig, **FIELDS)

        async def joins_and_leaves() -> None:
            with (tmp_path / "join.out").open("wb") as out:
                command = [*machine, sys.executable, "-m", "millrace.cli", "join", *words]
                joined = await asyncio.create_subprocess_exec(*command, stdout=out, stderr=out)
            await rig.well(4, 60)
            await asyncio.sleep(1)
            for cut, mended in ((("link", "set", CABLE, "down"), ("link", "set", CABLE, "up")), DEAF):
                assert not _ip(*cut)
                await rig.well(2)
                await asyncio.sleep(1)
                assert not _ip(*mended)
                await rig.well(4)
                await asyncio.sleep(1)
            for verbs in zip(*LOSSY, strict=True):
                assert not sum(_ip(*words) for words in verbs)
                await asyncio.sleep(4)
            await rig.well(4)
            said = await asyncio.to_thread(rig.cli, "apply", "--dry-run", "--set", "worker.max_num_seqs=9")
            assert "other machines stay as they are (other)" in said
            command = [*machine, sys.executable, "-m", "millrace.cli", "apply", "--dir", str(tmp_path / "there")]
            changed = await asyncio.create_subprocess_exec(*command, "--set", "worker.max_num_seqs=9")
            assert await asyncio.wait_for(changed.wait(), 200) == 0
            assert "other-worker-2 begins" in await asyncio.to_thread(rig.cli, "scale", "m", "+1")
            await rig.well(5)
            assert "will stay away" in await asyncio.to_thread(rig.cli, "drain", "other-worker-2")
            joined.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(joined.wait(), 90) == 0, (tmp_path / "join.out").read_text()
            await rig.well(2)

        results = await offer_during(rig, joins_and_leaves(), rate=6.0, prompts=PROMPTS, **FIELDS)
        expect_identical(results, expected)
        assert "this machine has left the cluster" in (tmp_path / "join.out").read_text()
        assert await rig.metric("millrace_ingress_migrations_total", 'outcome="moved"')


async def test_an_ingress_that_is_cut_off_refuses_and_serves_again(tmp_path: Path, machine: list[str]) -> None:
    model, other = write_model_folder(tmp_path / "model"), f"http://{THERE}:8000"
    words = ("--set", f"nats.host={HERE}", "--set", "worker.modelled.speed=0.3")
    with UpRig(tmp_path / "c", model_path=model, engine="modelled", instances=2, extra=words) as rig:
        expected, nats_url = await undisturbed(rig, **FIELDS), rig.cluster_file()["nats_url"]
        config = json.loads((rig.folder / "run" / "ingress-0.json").read_text())
        config |= {"name": "other", "telemetry": {}, "dispatch": {"wait_s": 2}}
        config |= {"http": {"host": THERE}, "bus": config["bus"] | {"servers": [nats_url]}}
        (tmp_path / "other.json").write_text(json.dumps(config))
        command = [*machine, sys.executable, "-m", "services.ingress", "--config", str(tmp_path / "other.json")]
        port = nats_url.rpartition(":")[2]
        there, back = _drops("OUTPUT", f"--dport {port}"), _drops("INPUT", f"--sport {port}")

        def cancelled() -> bool:
            """Whether a worker has let go what the other ingress had."""
            lines = (line for file in (rig.folder / "logs").glob("worker-*.log") for line in file.open())
            return any("orphans_cancelled" in line and "ingress=other" in line for line in lines)

        async def is_cut_off_and_back() -> None:
            with (tmp_path / "other.out").open("wb") as out:
                await asyncio.create_subprocess_exec(*command, stdout=out, stderr=out)
            for cut in ([there, back], [there], [back]):
                await until_answered(f"{other}/ready", 60)
                async with client(120) as http:
                    begun = TimedStream(settle=2)
                    api = SimpleNamespace(url=other, model="m")
                    playing = asyncio.create_task(play(http, api, begun, prompt=prompt_text(0), **FIELDS))
                    await begun.settled.wait()
                    assert not sum(_ip(*begin) for begin, _ in cut)
                    for _ in range(2):  # the one waits, the other is refused at once
                        answer = await http.post(f"{other}/v1/completions", json={"model": "m", "prompt": "a"})
                        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
                        assert "no connection to NATS" in answer.text
                    for path in ("/ready", "/health"):
                        assert (await http.get(f"{other}{path}")).status_code == 503
                    if len(cut) == 2:  # the next time it is excused for longer
                        await until(cancelled, look_s=0.1)
                    assert not sum(_ip(*end) for _, end in cut)
                    assert (await playing).outcome == expected[0]

        expect_identical(await offer_during(rig, is_cut_off_and_back(), rate=4.0, prompts=PROMPTS, **FIELDS), expected)
        await told(rig, instances_ready=2, running=0, waiting=0, blocks_used=0)
