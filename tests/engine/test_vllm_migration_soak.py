"""Many moves of sequences that decode beside each other, some of them going wrong: every token as unmoved."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from millrace.actor.engine import KvDenied, KvLeaseTaken, KvRoomReserved, SequenceStopped
from millrace.contracts.worker import Sampling

from tests.engine.bench_engine import BenchEngine
from tests.engine.moving import Journey, Pair, prompt_of, settled

#: Starting engines takes a minute where other test runs share the cores.
pytestmark = pytest.mark.timeout(600)

#: More by `python -m bench migration_soak`.
MOVES = 100
SEED = 20
#: (prompt's length, sampling); each begins anew as soon as it has ended.
KINDS = [
    (9, Sampling(max_tokens=230, temperature=0.0, ignore_eos=True)),
    (64, Sampling(max_tokens=210, seed=5, ignore_eos=True)),
    (100, Sampling(max_tokens=190, seed=6, temperature=0.8, top_k=40, frequency_penalty=0.4, ignore_eos=True)),
    (150, Sampling(max_tokens=180, temperature=0.0, repetition_penalty=1.2, ignore_eos=True)),
]


class Traveller(msgspec.Struct, kw_only=True):
    """One sequence, wherever it is."""

    name: str
    kind: int
    at: Pair
    before: list[int] = []

    def tokens(self) -> list[int]:
        """All so far."""
        decoded = self.at.source.decoded.get(self.name)
        return [*self.before, *(decoded.tokens if decoded else [])]

    def ended(self) -> bool:
        decoded = self.at.source.decoded.get(self.name)
        return decoded is not None and decoded.finish is not None


def test_many_moves_change_no_token_and_lose_no_block(pair: Pair) -> None:
    rng = random.Random(SEED)
    expected = [
        pair.source.run(prompt_of(length, salt=300 + kind), how).tokens for kind, (length, how) in enumerate(KINDS)
    ]
    travellers = [_begin(pair if index % 2 else pair.turned(), index % len(KINDS)) for index in range(6)]
    moves = 0
    while moves < MOVES:
        index = rng.randrange(len(travellers))
        traveller = travellers[index]
        moves += _move(traveller, rng)
        if traveller.ended():
            assert traveller.tokens() == expected[traveller.kind], f"{traveller.name} after {moves} moves"
            travellers[index] = _begin(traveller.at, rng.randrange(len(KINDS)))
    for traveller in travellers:
        traveller.at.source.finish(traveller.name)
        assert traveller.tokens() == expected[traveller.kind]
    settled(pair)


def _begin(at: Pair, kind: int) -> Traveller:
    length, sampling = KINDS[kind]
    return Traveller(name=at.source.add(prompt_of(length, salt=300 + kind), sampling), kind=kind, at=at)


def _move(traveller: Traveller, rng: random.Random) -> int:
    """Tries to move it, now and then the wrong way; returns whether it has moved."""
    length, sampling = KINDS[traveller.kind]
    at = traveller.at
    journey = Journey(
        pair=at,
        migration=at.migration(),
        name=traveller.name,
        prompt=prompt_of(length, salt=300 + traveller.kind),
        sampling=sampling,
        before=traveller.before,
    )
    fault = rng.choice(["", "", "", "thaw", "tail", "late", "unpulled"])
    if not isinstance(journey.lease(), KvLeaseTaken):
        _wait_a_token(at.source, traveller)
        return 0
    reserved = isinstance(journey.reserve(), KvRoomReserved)
    pulled = journey.pull() if reserved and fault != "unpulled" else None
    stopped = journey.freeze() if reserved else None
    if isinstance(pulled, KvDenied):
        assert isinstance(stopped, KvDenied), "a read fails only where the lease was lost: it was preempted"
    if not isinstance(stopped, SequenceStopped) or fault == "thaw":
        journey.unreserve()
        journey.end(moved=False)
        return 0
    assert journey.stopped is not None
    spoilt = [[sum_ ^ 1 for sum_ in rank] for rank in journey.stopped.checksums]
    changes: dict[str, dict[str, Any]] = {"tail": {"checksums": spoilt}, "late": {"read_ms": 0}}
    journey.commit(**changes.get(fault, {}))
    journey.end(moved=True)
    traveller.before, traveller.at = journey.stopped.output_token_ids, at.turned()
    return 1


def _wait_a_token(engine: BenchEngine, traveller: Traveller) -> None:
    """It waits, computes its prompt, or has just ended."""
    count = len(traveller.tokens())
    engine.until(lambda: traveller.ended() or len(traveller.tokens()) > count)
