"""Moves a sequence between two real engines, step by step, as the workers and migrators would."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
from millrace.actor.engine import (
    EndLeaseInEngine,
    EngineSequence,
    EngineStepped,
    FreezeInEngine,
    KvBlocksRead,
    KvCommand,
    KvDenied,
    KvLeaseTaken,
    KvRoomReserved,
    LeaseInEngine,
    ReserveInEngine,
    SequenceStopped,
    UnreserveInEngine,
)
from millrace.contracts.kv import KvEndpoint, KvHandover
from millrace.contracts.worker import Sampling

from tests.engine.bench_engine import BenchEngine, Decoded
from tests.testbed.move_commands import handover_of, pull_of

_ANSWERS = (KvLeaseTaken, SequenceStopped, KvRoomReserved, KvBlocksRead, KvDenied)
_SERIALS = itertools.count(1)


class Pair:
    """Two engines, each on a loop of its own: while one is asked the other decodes on in its process."""

    def __init__(self, source: BenchEngine, target: BenchEngine) -> None:
        self.source, self.target = source, target

    def turned(self) -> Pair:
        """The other way round."""
        return Pair(self.target, self.source)

    def migration(self) -> str:
        return f"g{next(_SERIALS)}"


def tell(engine: BenchEngine, command: KvCommand) -> None:
    """A command without answer."""

    async def move() -> None:
        engine.engine.move(command)

    engine.loop.run_until_complete(move())


def ask(engine: BenchEngine, command: KvCommand) -> Any:
    """A command's answer."""
    since = len(engine.events)
    tell(engine, command)

    def answers() -> list[Any]:
        events = engine.events[since:]
        return [each for each in events if isinstance(each, _ANSWERS) and each.migration == command.migration]

    engine.until(lambda: bool(answers()))
    return answers()[0]


class Journey(msgspec.Struct, kw_only=True):
    """One migration: what is moved, and how far it is."""

    pair: Pair
    migration: str
    name: str
    prompt: list[int]
    sampling: Sampling
    before: list[int] = []
    leased: KvLeaseTaken | None = None
    stopped: SequenceStopped | None = None
    have: int = 0
    descriptors: int = 0

    def endpoint(self) -> KvEndpoint:
        endpoint = self.pair.source.info.kv
        assert endpoint is not None
        return endpoint

    def lease(self) -> Any:
        said = ask(self.pair.source, LeaseInEngine(migration=self.migration, sequence=self.name, from_block=0))
        if isinstance(said, KvLeaseTaken):
            self.leased = said
        return said

    def reserve(self, blocks: int = 0) -> Any:
        assert self.leased is not None, self.pair.source.events[-1]
        known = self.leased.prompt_tokens + self.leased.output_tokens
        tokens = [*self.prompt, *self.before, *self.pair.source.decoded[self.name].tokens][:known]
        command = ReserveInEngine(
            migration=self.migration,
            sequence=self.name,
            endpoint=self.endpoint(),
            token_ids=tokens[:1] if self.sampling.cache_salt else tokens,
            blocks=blocks or len(tokens) // self.endpoint().block_tokens + 2,
            adapter=self.sampling.adapter,
        )
        said = ask(self.pair.target, command)
        if isinstance(said, KvRoomReserved):
            self.have = said.matched_blocks
        return said

    def pull(self, **changes: Any) -> Any:
        """Pulls what the last lease told, in time whenever that ends."""
        assert self.leased is not None
        said = ask(self.pair.target, pull_of(self.leased, **changes))
        if isinstance(said, KvBlocksRead):
            self.have = max(self.have, said.from_block + said.blocks)
            self.descriptors += said.descriptors
        return said

    def freeze(self) -> Any:
        said = ask(self.pair.source, FreezeInEngine(migration=self.migration, sequence=self.name, from_block=self.have))
        if isinstance(said, SequenceStopped):
            self.stopped = said
        return said

    def given(self, output: list[int], handover: KvHandover) -> EngineSequence:
        """The sequence as it comes to the target with such an output."""
        fields = {"sequence": self.name, "prompt_token_ids": self.prompt, "sampling": self.sampling}
        return EngineSequence(output_token_ids=output, handover=handover, **fields)

    def commit(self, **changes: Any) -> None:
        """The target takes it."""
        assert self.stopped is not None
        self.pair.target.decoded.pop(self.name, None)
        handover = handover_of(self.stopped, self.endpoint(), **{"read_ms": 60_000, **changes})
        self.pair.target.bring(self.given(self.stopped.output_token_ids, handover))

    def end(self, *, moved: bool) -> None:
        tell(self.pair.source, EndLeaseInEngine(migration=self.migration, moved=moved))

    def unreserve(self) -> None:
        tell(self.pair.target, UnreserveInEngine(migration=self.migration))

    def go(self) -> None:
        """All of it, one hot round."""
        assert isinstance(self.lease(), KvLeaseTaken), self.pair.source.events[-1]
        assert isinstance(self.reserve(), KvRoomReserved), self.pair.target.events[-1]
        assert isinstance(self.pull(), KvBlocksRead), self.pair.target.events[-1]
        assert isinstance(self.freeze(), SequenceStopped), self.pair.source.events[-1]
        self.commit()
        self.end(moved=True)


def begin(
    pair: Pair, prompt: list[int], sampling: Sampling, *, at: int, before: list[int] | None = None, name: str = ""
) -> Journey:
    """A sequence that decodes at the source and has ``at`` tokens or a few more."""
    name = name or pair.source.add(prompt, sampling, before or [])
    until_tokens(pair.source, name, at - len(before or []))
    return Journey(
        pair=pair, migration=pair.migration(), name=name, prompt=prompt, sampling=sampling, before=before or []
    )


def until_tokens(engine: BenchEngine, name: str, count: int) -> None:
    """Waits until an engine has told so many tokens of a sequence."""
    engine.until(lambda: count <= 0 or (name in engine.decoded and len(engine.decoded[name].tokens) >= count))


def whole(journey: Journey) -> Decoded:
    """The sequence as its client saw it: what the source gave, then what the target gave."""
    assert journey.stopped is not None
    (there,) = journey.pair.target.finish(journey.name)
    here = journey.pair.source.decoded[journey.name]
    assert [*journey.before, *here.tokens] == journey.stopped.output_token_ids, "every output came before the stop"
    return Decoded(
        tokens=[*journey.before, *here.tokens, *there.tokens],
        logprobs=[*here.logprobs, *there.logprobs],
        finish=there.finish,
        first=there.first,
    )


def there_and_back(pair: Pair, prompt: list[int], sampling: Sampling, at: int) -> Decoded:
    """The sequence as its client saw it: it moved at so many tokens, and back after some more."""
    there = begin(pair, prompt, sampling, at=at)
    there.go()
    before = there.stopped.output_token_ids
    until_tokens(pair.target, there.name, 30)
    back = begin(pair.turned(), prompt, sampling, at=0, before=before, name=there.name)
    back.go()
    return whole(back)


def prompt_of(length: int, salt: int = 0) -> list[int]:
    """Prompts that share no block."""
    return [(salt * 7919 + index * index * 31 + index * (salt + 1)) % 250 + 1 for index in range(length)]


def settled(pair: Pair) -> None:
    """Every block is free again on both sides."""
    for engine in (pair.source, pair.target):
        engine.until(engine.idle)
        assert not engine.failures


def recomputed(engine: BenchEngine, since: int) -> int | None:
    """Prompt tokens that an engine computed in the steps it told after so many events; None where a step's snapshot was
    overwritten by the next one's before the worker came to read it.
    """
    steps = [event for event in engine.events[since:] if isinstance(event, EngineStepped)]
    if any(event.snapshot is None or event.snapshot.step != event.step for event in steps):
        return None
    return sum(event.snapshot.batch.prefill_tokens for event in steps if event.snapshot)
