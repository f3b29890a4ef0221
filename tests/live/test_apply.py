"""`millrace apply` on a live cluster under load: instances come, go and change, and policies too; no stream notices."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.live.faults import PROMPTS, expect_identical, expected_outcomes, kill, told
from tests.live.ingress_rig import write_model_folder
from tests.testbed.programs import Program, start_program
from tests.testbed.up_cluster import UpRig, offer_during
from tests.testbed.waiting import until

#: Some 3 s a stream.
LENGTH = {"max_tokens": 60, "ignore_eos": True}
RATE = 2.0
SPEED = "modelled.speed = 0.1"

CLUSTER = """
[[models]]
name = "m"
path = "{model}"

[[models.groups]]
count = {count}
processes = {count}
spares = {spares}
engine = "modelled"

[models.groups.settings]
max_num_seqs = {sequences}
kv_blocks = 2048
limits.linger_ms = 200
{more}

[policies.dispatch]
name = "{policy}"
"""


class Cluster:
    """A rig, the file that describes it, and what of that file is in force."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "cluster.toml"
        model = write_model_folder(folder / "model")
        self.spec = {"model": model, "count": 3, "spares": 0, "sequences": 8, "policy": "forecast", "more": SPEED}
        self.write()
        self.rig = UpRig.of_words(folder / "cluster", ("--cluster", str(self.file)), "m")

    def write(self, **change: object) -> None:
        self.file.write_text(CLUSTER.format(**(self.spec | change)))

    def write_wrong(self, **change: object) -> None:
        """Something that drains every instance, and shall not stay."""
        self.write(sequences=self.spec["sequences"] + 1, **change)

    async def apply(self, *words: str) -> str:
        return await asyncio.to_thread(self.rig.cli, "apply", str(self.file), *words, limit_s=200)

    async def applied(self, **change: object) -> str:
        self.spec |= change
        self.write()
        said = await self.apply("--reason", "tried", "--within", "60")
        assert said.splitlines()[-1].endswith("the cluster is as the file says"), said
        assert await self.apply("--dry-run") == "nothing changes\n"
        return said

    async def only_one_and_a_spare(self) -> None:
        if self.spec["count"] != 1:
            await self.applied(count=1, spares=1)

    async def as_before(self) -> None:
        """Waits until all serves as it did before, and nothing else is in force."""
        shown = await asyncio.to_thread(self.rig.cli, "cluster", "show")
        assert f"max_num_seqs = {self.spec['sequences']}" in shown
        assert "canary" not in shown
        await told(self.rig, instances_ready=3, running=0, waiting=0, blocks_used=0)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("applied"))
    with made.rig:
        yield made


async def changes(cluster: Cluster) -> None:
    await cluster.applied(count=2)
    await cluster.applied(count=3, policy="join_shortest_queue")
    await cluster.applied(sequences=9)


async def test_instances_flags_and_policies_change_under_load_and_no_stream_notices(cluster: Cluster) -> None:
    expected = await expected_outcomes(cluster.rig, **LENGTH)
    expect_identical(await offer_during(cluster.rig, changes(cluster), rate=RATE, prompts=PROMPTS, **LENGTH), expected)
    await told(cluster.rig, instances_ready=3, running=0, waiting=0, blocks_used=0)
    shown = await asyncio.to_thread(cluster.rig.cli, "cluster", "show")
    assert "at the start" not in shown
    assert "max_num_seqs = 9" in shown
    assert "join_shortest_queue" in shown
    assert '"reason":"tried"' in (cluster.rig.folder / "run" / "orders.log").read_text()


@asynccontextmanager
async def applying(cluster: Cluster, until_said: bytes) -> AsyncIterator[tuple[Program, Path]]:
    """The command and what it says, once it has said so."""
    environment = os.environ | {"MILLRACE_DIR": str(cluster.rig.folder)}
    said = cluster.file.parent / "apply.out"
    with said.open("wb") as out:
        command = start_program(
            "millrace.cli", ["apply", str(cluster.file)], output=out, environment=environment, own_session=True
        )
        taken = cluster.rig.folder / "run" / "cluster.toml"
        await until(lambda: until_said in said.read_bytes() + taken.read_bytes(), look_s=0.05)
        yield command, said


async def goes_back(cluster: Cluster) -> None:
    """The engine says something else than it should: the first instance does not serve, and all goes back."""
    cluster.write_wrong(more=f'{SPEED}\ncanary = {{ prompt = "Say", text = "something that no engine says" }}')
    said = await cluster.apply()
    assert "canary: the engine says" in said, said
    assert "the cluster is as it was before" in said


async def left_broken(cluster: Cluster) -> None:
    """The command and the supervisor are killed once it starts such an engine; what lives goes on, and is put right."""
    cluster.write_wrong(more=f'{SPEED}\ncanary = {{ prompt = "Say", text = "something that no engine says" }}')
    async with applying(cluster, b"worker-0 starts") as (command, _):
        command.send_signal(signal.SIGKILL)
        assert cluster.rig.process is not None
        cluster.rig.process.kill()
        await asyncio.to_thread(cluster.rig.process.wait)
    log = cluster.rig.folder / "logs" / "supervisor.log"
    began = log.stat().st_size
    up = asyncio.create_task(asyncio.to_thread(cluster.rig.start))
    await until(lambda: log.read_bytes()[began:].count(b"child=worker-0 exit=") > 3, look_s=0.05)
    await cluster.applied()
    await up


async def crashes(cluster: Cluster) -> None:
    """The first changed instance dies once it serves."""
    cluster.write_wrong()
    async with applying(cluster, b"worker-0 ready") as (command, said):
        kill(cluster.rig.log_pids("worker-0")[0])
        await asyncio.to_thread(command.wait, 60)
    assert "worker-0 crashed (ended by SIGKILL)" in said.read_text()
    assert "the cluster is as it was before" in said.read_text()


async def slows_down(cluster: Cluster) -> None:
    """The first changed instance takes ten times as long for a token."""
    cluster.write_wrong(more="modelled.speed = 0.01")
    said = await cluster.apply()
    assert "times as long for a token" in said, said
    assert "the cluster is as it was before" in said


async def test_a_version_that_crashes_is_slow_or_does_not_start_goes_back_and_cuts_no_stream(cluster: Cluster) -> None:
    expected = await expected_outcomes(cluster.rig, **LENGTH)
    for bad in (crashes, slows_down, goes_back, left_broken):
        expect_identical(await offer_during(cluster.rig, bad(cluster), rate=RATE, prompts=PROMPTS, **LENGTH), expected)
        await cluster.as_before()


async def test_what_cuts_streams_or_needs_a_restart_is_refused_with_the_reason(cluster: Cluster) -> None:
    cluster.write()
    text = cluster.file.read_text()
    for change, why in {
        ('name = "m"', 'name = "other"'): "no instance of m would be left",
        ("count = 3\nprocesses = 3", 'count = 1\nprocesses = 1\nstep_time = "cpu-2m"'): "only instance of m",
        ("[[models]]", "nats.port = 4999\n[[models]]"): "nats changes; this needs a restart",
        ("max_num_seqs", "max_num_seks"): "max_num_seks",
    }.items():
        cluster.file.write_text(text.replace(*change))
        assert why in await cluster.apply(), change
    cluster.file.write_text(text)
    assert await cluster.apply() == "nothing changes\n"


async def stood_in(cluster: Cluster) -> None:
    """The only instance of a model is changed, to another folder of it too, while a spare stands in."""
    await cluster.only_one_and_a_spare()
    said = await cluster.applied(model=write_model_folder(cluster.file.parent / "revision"))
    steps = ("worker-1 starts", "worker-1 ready", "worker-0 drains", "worker-0 starts", "worker-1 drains")
    assert sorted(steps, key=said.index) == list(steps), said
    cluster.write_wrong(more=f'{SPEED}\ncanary = {{ prompt = "Say", text = "something that no engine says" }}')
    said = await cluster.apply()
    assert "worker-1 does not start" in said
    assert "worker-0 drains" not in said
    assert "the cluster is as it was before" in said


async def test_a_spare_stands_in_for_the_only_instance_of_a_model(cluster: Cluster) -> None:
    expected = await expected_outcomes(cluster.rig, **LENGTH)
    expect_identical(await offer_during(cluster.rig, stood_in(cluster), rate=RATE, prompts=PROMPTS, **LENGTH), expected)
    await told(cluster.rig, instances_ready=1, running=0, waiting=0, blocks_used=0)


async def broken_off(cluster: Cluster, said: str, killed: str, *, on: bool) -> None:
    """The command is killed once it has said so, or the supervisor, or both; something starts the supervisor again."""
    other = {"forecast": "round_robin"}.get(str(cluster.spec["policy"]), "forecast")
    change = {"sequences": int(str(cluster.spec["sequences"])) + 1, "policy": other}
    cluster.write(**change)
    async with applying(cluster, said.format(**change).encode()) as (command, out):
        if "command" in killed:
            command.send_signal(signal.SIGKILL)
        if "supervisor" in killed:
            assert cluster.rig.process is not None
            cluster.rig.process.kill()
            await asyncio.to_thread(cluster.rig.process.wait)
            await asyncio.to_thread(cluster.rig.start)
        if "command" not in killed:
            assert await asyncio.to_thread(command.wait, 120) == 0, out.read_text()
            cluster.spec |= change
    if "command" in killed:
        await cluster.applied(**(change if on else {}))
    assert await cluster.apply("--dry-run") == "nothing changes\n"
    await told(cluster.rig, instances_ready=1)


@pytest.mark.parametrize(
    ("said", "killed", "on"),
    [
        ("\nmax_num_seqs = {sequences}", "command and supervisor", True),  # in the file in force
        ("s  ingress-", "command", False),
        ("worker-1 starts", "command and supervisor", False),
        ("worker-1 ready", "supervisor", True),
        ("worker-0 drains", "command", True),
        ("worker-0 starts", "command and supervisor", True),
    ],
)
async def test_what_is_broken_off_at_any_point_goes_on_or_back(
    cluster: Cluster, said: str, killed: str, on: bool
) -> None:
    await cluster.only_one_and_a_spare()
    expected = await expected_outcomes(cluster.rig, **LENGTH)
    work = broken_off(cluster, said, killed, on=on)
    expect_identical(await offer_during(cluster.rig, work, rate=RATE, prompts=PROMPTS, **LENGTH), expected)
    await told(cluster.rig, instances_ready=1, running=0, waiting=0, blocks_used=0)
