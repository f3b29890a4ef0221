"""Each family of models in a cluster of two real engines: text over HTTP is plain vLLM's, handed
from prefill to decode, drained, and after kill -9 of an engine.

`./task test` hands over one, `./task test:families` does all of it with each.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from millrace.contracts.broker import MoveReason
from millrace.contracts.migration import MigrationFinished, MigrationOutcome
from millrace.contracts.plan import InstanceRole

from tests.engine.bench_engine import reference
from tests.engine.conftest import MOVES, Note
from tests.engine.moving import prompt_of
from tests.live.faults import kill
from tests.live.mover import Mover
from tests.testbed import moving_families
from tests.testbed.moving_families import Family
from tests.testbed.role_operator import RoleOperator
from tests.testbed.timed_streams import TimedStream, client, play
from tests.testbed.up_cluster import UpRig

pytestmark = pytest.mark.timeout(600)

#: Some tokens short of the window of 64, which moves on while they are answered.
PROMPT = prompt_of(50, salt=50)
TEXT: dict[str, Any] = {
    "max_tokens": 1200 if MOVES else 300,
    "ignore_eos": True,
    "temperature": 0,
    "return_token_ids": True,
}
#: Of what is handed over, unless its tokens are drafted: by n-grams 300 take so few steps that it may end before.
SHORTER = TEXT | {"max_tokens": 300}
#: Output tokens that a stream has, or some more, when its engine is killed.
KILLED_AT = 200
CONTINUATIONS = "millrace_ingress_continuations_total"


@pytest.fixture(scope="module")
def expected(family: Family, folder: Path) -> list[int]:
    """Tokens that plain vLLM says."""
    fields = {name: TEXT[name] for name in ("max_tokens", "ignore_eos", "temperature")}
    engine = moving_families.engine_args(family, folder)
    return reference(folder, [(PROMPT, fields)], enable_prefix_caching=False, **engine)[0][0]


@pytest.fixture(scope="module")
def rig(family: Family, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpRig]:
    """In float32, as the reference. Whoever is killed shall have had work."""
    worker = {"dtype": "float32", "enforce_eager": True, "engine_args": moving_families.engine_args(family, folder)}
    extra = ("--policy", "round_robin", "--set", f"worker={json.dumps(worker)}")
    home = tmp_path_factory.mktemp("cluster")
    with UpRig(home / "c", model_path=folder, engine="vllm", instances=2, extra=extra) as cluster:
        yield cluster


async def begin(http: httpx.AsyncClient, rig: UpRig, *, tokens: int, **fields: Any) -> list[asyncio.Task[TimedStream]]:
    """A stream on each engine, when both have so many tokens."""
    streams = [TimedStream(settle=tokens) for _ in range(2)]
    tasks = [asyncio.create_task(play(http, rig, stream, prompt=PROMPT, **fields)) for stream in streams]
    for stream in streams:
        await stream.settled.wait()
    return tasks


async def told(tasks: list[asyncio.Task[TimedStream]]) -> list[list[int]]:
    """Tokens of streams that all end well."""
    streams = await asyncio.gather(*tasks)
    assert not [stream.error for stream in streams if stream.error]
    return [stream.token_ids for stream in streams]


def moves(onlooker: Mover) -> set[tuple[str, str, MoveReason]]:
    moved: list[MigrationFinished] = [body for body in onlooker.heard if body.outcome is MigrationOutcome.MOVED]
    return {(body.source, body.target, body.reason) for body in moved}


async def test_streams_are_handed_from_prefill_to_decode(family: Family, rig: UpRig, expected: list[int]) -> None:
    fields = TEXT if "speculative_config" in family.engine else SHORTER
    async with RoleOperator(rig) as operator, Mover(rig, modes=()) as onlooker, client() as http:
        await operator.flip("worker-0", InstanceRole.PREFILL)
        await operator.flip("worker-1", InstanceRole.DECODE)
        assert await told(await begin(http, rig, tokens=1, **fields)) == [expected[: fields["max_tokens"]]] * 2
        await operator.flip("worker-1", InstanceRole.BOTH)
        await operator.flip("worker-0", InstanceRole.BOTH)
    assert moves(onlooker) == {("worker-0", "worker-1", MoveReason.HANDOFF)}


@pytest.mark.skipif(not MOVES, reason="MILLRACE_FAMILIES asks for it")
async def test_streams_move_when_an_instance_is_drained(rig: UpRig, expected: list[int]) -> None:
    async with Mover(rig, modes=()) as onlooker, client() as http:
        tasks = await begin(http, rig, tokens=1, **TEXT) + await begin(http, rig, tokens=20, **TEXT)
        await asyncio.to_thread(rig.cli, "drain", "worker-0", "--keep")
        assert await told(tasks) == [expected] * 4
    assert {(source, target) for source, target, _ in moves(onlooker)} == {("worker-0", "worker-1")}


@pytest.mark.skipif(not MOVES, reason="MILLRACE_FAMILIES asks for it")
async def test_streams_are_plain_vllms_also_of_an_engine_that_is_killed(
    rig: UpRig, expected: list[int], note: Note
) -> None:
    """The last: it leaves the cluster with one engine. To each other stream nothing happens."""
    before = await rig.metric(CONTINUATIONS)
    async with client() as http:
        tasks = await begin(http, rig, tokens=KILLED_AT, **TEXT) + await begin(http, rig, tokens=1, **TEXT)
        kill(rig.log_pids("worker-0")[-1])
        assert await told(tasks) == [expected] * len(tasks)
    assert await rig.metric(CONTINUATIONS) - before >= len(tasks) / 2
    note("kills", len(tasks) // 2)
