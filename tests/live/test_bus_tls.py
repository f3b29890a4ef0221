"""NATS that asks everybody for a certificate of the cluster's own authority, and a certificate that is renewed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path

import nats
import pytest

from tests.live.faults import PATIENCE_S, PROMPTS, expect_identical, told, undisturbed
from tests.live.ingress_rig import write_model_folder
from tests.testbed.programs import output_of
from tests.testbed.up_cluster import UpRig, offer_during

LENGTH = {"max_tokens": 60, "ignore_eos": True}
WORKER = {"max_num_seqs": 16, "kv_blocks": 2048, "modelled": {"speed": 0.1}}


def certs(*words: str) -> tuple[int, str]:
    """Exit code and output of `millrace certs`."""
    return output_of("millrace.cli", ["certs", *words], environment=dict(os.environ))


def names_of(certificate: Path) -> set[tuple[str, str]]:
    decoded = ssl._ssl._test_decode_cert(str(certificate))  # type: ignore[attr-defined]
    return set(decoded["subjectAltName"])


def test_certificates_are_private_and_a_renewed_one_keeps_its_authority_and_its_names(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    assert certs(str(folder), "--renew")[0] == 1, "there is nothing to renew"
    assert certs(str(folder), "--host", "10.0.0.7")[0] == 0
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {name: (folder / name).stat().st_mode & 0o077 for name in files if name != "ca.pem"} == {
        "ca.key": 0,
        "bus.pem": 0,
    }
    code, said = certs(str(folder))
    assert (code, "--renew" in said) == (1, True)
    assert files == {path.name: path.read_bytes() for path in folder.iterdir()}, "nothing is replaced unasked"
    assert certs(str(folder), "--renew", "--host", "bus.example")[0] == 0
    assert {name for name in files if (folder / name).read_bytes() != files[name]} == {"bus.pem"}
    names = names_of(folder / "bus.pem")
    assert {("IP Address", "127.0.0.1"), ("IP Address", "10.0.0.7"), ("DNS", "bus.example")} <= names


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[UpRig]:
    assert certs(str(tmp_path / "certs"))[0] == 0
    options = ["--processes", "2", "--set", "nats.servers=3", "--set", f"nats.tls={tmp_path / 'certs'}"]
    options += ["--set", "worker=" + json.dumps(WORKER)]
    model = write_model_folder(tmp_path / "model")
    with UpRig(tmp_path / "cluster", model_path=model, engine="modelled", instances=2, extra=options) as cluster:
        yield cluster


async def shown_serial(url: str, context: ssl.SSLContext) -> str:
    """Serial number of the certificate that a server shows."""
    host, _, port = url.removeprefix("nats://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    await reader.readline()
    await writer.start_tls(context, server_hostname=host)
    certificate = writer.get_extra_info("ssl_object").getpeercert()
    writer.close()
    return str(certificate["serialNumber"])


async def renewed_everywhere(rig: UpRig, folder: Path) -> None:
    """Every server shows another certificate, and an engine and a server that start anew are let in with theirs."""
    trusting = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    trusting.load_cert_chain(folder / "bus.pem")
    urls = rig.cluster_file()["nats_url"].split(",")
    before = [await shown_serial(url, trusting) for url in urls]
    assert (await asyncio.to_thread(certs, str(folder), "--renew"))[0] == 0
    async with asyncio.timeout(PATIENCE_S):
        for url, serial in zip(urls, before, strict=True):
            while await shown_serial(url, trusting) == serial:  # noqa: ASYNC110 - until nats-server has read it
                await asyncio.sleep(0.1)
    log = (rig.folder / "logs" / "ingress-0.log").read_text()
    assert "bus_disconnected" not in log, "the connections stayed"
    often = rig.output().count("nats-0 ready")
    for name in ("nats-0.conf", "worker-0.json"):
        os.kill(rig.pids(name)[0], signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        while rig.output().count("nats-0 ready") == often:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await told(rig, instances_ready=2)


async def refused(rig: UpRig, **options: object) -> bool:
    """Whether a client with the operator's password is not let in."""
    known = rig.cluster_file()
    user = known["operator_user"]
    try:
        client = await nats.connect(
            known["nats_url"].split(",")[0],
            user=user,
            password=known["operator_password"],
            inbox_prefix=f"_INBOX.{user}",
            allow_reconnect=False,
            max_reconnect_attempts=0,
            connect_timeout=10,
            **options,
        )
        await client.flush()
        await client.close()
    except (OSError, nats.errors.Error):
        return True
    return False


async def test_who_shows_no_certificate_is_refused_and_renewing_cuts_no_stream(rig: UpRig, tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    expected = await undisturbed(rig, **LENGTH)
    without = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    with_one = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    with_one.load_cert_chain(folder / "bus.pem")
    assert await refused(rig, tls=without)
    assert not await refused(rig, tls=with_one)
    certs(str(tmp_path / "other"))
    stranger = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    stranger.load_cert_chain(tmp_path / "other" / "bus.pem")
    assert await refused(rig, tls=stranger), "a certificate of another authority"
    results = await offer_during(rig, renewed_everywhere(rig, folder), rate=2, prompts=PROMPTS, **LENGTH)
    expect_identical(results, expected)
    assert "worker-1" in await asyncio.to_thread(rig.cli, "status")
