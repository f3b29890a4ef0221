"""Kill -9, or a stopped process, within a migration between real engines: no token and no block is lost.

Every step and everybody who takes part: tests/live/test_migration_kills.py, with modelled engines, which start at once.
"""

import asyncio
import os
import signal

import pytest

from tests.testbed.migration_operator import Operator
from tests.testbed.migration_steps import (
    FREEZE,
    SOURCE,
    STREAMS,
    SUBMIT,
    TARGET,
    kill_at,
    migrate_under,
    start_stream,
    undisturbed,
    whole_again,
)
from tests.testbed.timed_streams import client
from tests.testbed.up_cluster import UpRig


@pytest.fixture(scope="module")
def expected(rig: UpRig) -> dict[int, str]:
    return asyncio.run(undisturbed(rig))


@pytest.mark.parametrize(("victim", "step"), [(SOURCE, FREEZE), (TARGET, SUBMIT)], ids=["source", "target"])
async def test_killing_it_in_a_migration_costs_no_token_and_no_block(
    rig: UpRig, expected: dict[int, str], victim: str, step: str
) -> None:
    await kill_at(rig, expected, victim, step)


async def test_a_target_that_hangs_in_the_freeze_is_given_up_and_the_source_decodes_on(
    rig: UpRig, expected: dict[int, str]
) -> None:
    workers = {name: rig.log_pids(name)[0] for name in ("worker-0", "worker-1")}
    stopped: list[int] = []

    def freeze(source: str, target: str) -> None:
        stopped.append(workers[target])
        os.kill(workers[target], signal.SIGSTOP)

    try:
        async with client() as http:
            await migrate_under(rig, http, expected, SUBMIT, freeze)
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    await whole_again(rig)


async def test_twenty_migrations_at_once_and_back_again(rig: UpRig, expected: dict[int, str]) -> None:
    async with client() as http:
        began = [(number % STREAMS, *start_stream(http, rig, number % STREAMS)) for number in range(20)]
        async with Operator(rig) as operator:
            await operator.know(2)
            await asyncio.gather(*(stream.settled.wait() for _, stream, _ in began))
            first = await asyncio.gather(
                *(operator.migrate(s.sequence, operator.other(s.sequence)) for _, s, _ in began)
            )
            back = await asyncio.gather(
                *(operator.migrate(s.sequence, operator.other(s.sequence)) for _, s, _ in began)
            )
            streams = await asyncio.gather(*(task for _, _, task in began))
    assert sum(finished is not None and finished.outcome == "moved" for finished in first) >= 15, first
    assert any(finished is not None and finished.outcome == "moved" for finished in back), back
    for (number, _, _), stream in zip(began, streams, strict=True):
        assert (stream.error, stream.text) == ("", expected[number])
    await whole_again(rig)
