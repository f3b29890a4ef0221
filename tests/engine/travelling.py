"""Many moves of sequences that decode beside each other, some of them going wrong: every token as unmoved."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
from millrace.actor.engine import KvDenied, KvLeaseTaken, KvRoomReserved, SequenceStopped
from millrace.contracts.worker import Sampling

from tests.engine.bench_engine import BenchEngine
from tests.engine.moving import Pair, begin, prompt_of, settled

SEED = 20
#: (prompt's length, sampling); each begins anew as soon as it has ended.
KINDS = (
    (9, Sampling(max_tokens=230, temperature=0.0, ignore_eos=True)),
    (64, Sampling(max_tokens=210, seed=5, ignore_eos=True)),
    (100, Sampling(max_tokens=190, seed=6, temperature=0.8, top_k=40, frequency_penalty=0.4, ignore_eos=True)),
    (150, Sampling(max_tokens=180, temperature=0.0, repetition_penalty=1.2, ignore_eos=True)),
)
Kinds = Sequence[tuple[int, Sampling]]
#: Of these a sequence is computed anew, wholly or in part: where that rounds otherwise, tokens change.
COMPUTED_AGAIN = ("tail", "late")
FAULTS = ("", "", "", "thaw", "unpulled", *COMPUTED_AGAIN)


class Traveller(msgspec.Struct, kw_only=True):
    """One sequence, wherever it is; ``expected`` is what one says that stays."""

    name: str
    prompt: list[int]
    sampling: Sampling
    expected: list[int]
    at: Pair
    before: list[int] = []

    def tokens(self) -> list[int]:
        """All so far."""
        decoded = self.at.source.decoded.get(self.name)
        return [*self.before, *(decoded.tokens if decoded else [])]

    def ended(self) -> bool:
        decoded = self.at.source.decoded.get(self.name)
        return decoded is not None and decoded.finish is not None

    def again(self, at: Pair) -> Traveller:
        """One of the same kind that begins there."""
        return msgspec.structs.replace(self, name=at.source.add(self.prompt, self.sampling), at=at, before=[])


def travel(pair: Pair, moves: int, *, kinds: Kinds = KINDS, faults: Sequence[str] = FAULTS) -> None:
    """Six sequences at a time move so often, all together; each says what one says that stays."""
    rng = random.Random(SEED)
    prompts = [prompt_of(length, salt=300 + kind) for kind, (length, _) in enumerate(kinds)]
    names = [pair.source.add(prompt, how) for prompt, (_, how) in zip(prompts, kinds, strict=True)]
    stayed = [
        Traveller(name=name, prompt=prompt, sampling=how, expected=decoded.tokens, at=pair)
        for name, prompt, (_, how), decoded in zip(names, prompts, kinds, pair.source.finish(*names), strict=True)
    ]
    travellers = [stayed[index % len(stayed)].again(pair if index % 2 else pair.turned()) for index in range(6)]
    moved = 0
    while moved < moves:
        index = rng.randrange(len(travellers))
        traveller = travellers[index]
        moved += _move(traveller, rng.choice(faults))
        if traveller.ended():
            assert traveller.tokens() == traveller.expected, f"{traveller.name} after {moved} moves"
            travellers[index] = rng.choice(stayed).again(traveller.at)
    for traveller in travellers:
        traveller.at.source.finish(traveller.name)
        assert traveller.tokens() == traveller.expected
    settled(pair)


def _move(traveller: Traveller, fault: str) -> int:
    """Tries to move it, now and then the wrong way; returns whether it has moved."""
    at = traveller.at
    journey = begin(at, traveller.prompt, traveller.sampling, at=0, before=traveller.before, name=traveller.name)
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
