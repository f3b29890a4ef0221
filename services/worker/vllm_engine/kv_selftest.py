"""An engine's test of itself at its start: a sequence moves to the same engine, blocks and all, and must not notice.

Where vLLM's insides were read and never run (the V2 runner, scheduling ahead of a GPU, copies between GPUs), this is
what stands between a wrong reading of them and wrong text. It is one sampled sequence with a seed, alone in its batch,
so that even a small difference in its KV or its sampler's state gives other tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from millrace.actor.engine import (
    EndLeaseInEngine,
    EngineEvent,
    EngineFailed,
    EngineSequence,
    EngineStepped,
    FreezeInEngine,
    KvBlocksRead,
    KvCommand,
    KvDenied,
    KvLeaseTaken,
    KvRoomReserved,
    LeaseInEngine,
    PullIntoEngine,
    ReserveInEngine,
    SequenceRejected,
    SequenceStopped,
    StepOutput,
    UnreserveInEngine,
)
from millrace.contracts.kv import KvEndpoint, KvHandover
from millrace.contracts.worker import Sampling

#: Compiling and capturing at the first steps may take long; without an end in this time there is something wrong.
PATIENCE_S = 120.0
_MIGRATION = "self-test"
_NEVER_NS = 1 << 62
_READ_MS = 600_000
#: The prompt goes beyond the longest window of the engine's layers that is not longer than this: it takes no second.
_WINDOW_MAX = 1024
#: Token ids below this are special in the tokenizers that there are.
_FIRST_ID = 6


class Tested(Protocol):
    """Part of VllmEngine that is used."""

    def add(self, sequence: EngineSequence) -> None: ...

    def cancel(self, sequences: list[str]) -> None: ...

    def move(self, command: KvCommand, *, match_prefix: bool = True) -> None:
        """See Engine; without ``match_prefix`` a reservation leaves the prefix cache alone."""
        ...


class SelfTestFailed(Exception):
    """The engine must not move anything; the message says why."""


class LoopBack:
    """One run of the test. Hears everything that the engine says meanwhile."""

    def __init__(self, engine: Tested, endpoint: KvEndpoint, *, vocabulary: int, max_model_len: int) -> None:
        self._engine, self._endpoint = engine, endpoint
        self._events: asyncio.Queue[EngineEvent] = asyncio.Queue()
        self._outputs: dict[str, list[StepOutput]] = {}
        block = endpoint.block_tokens
        window = max((group.window for group in endpoint.groups if group.window <= _WINDOW_MAX), default=0)
        length = min(max(3 * block, window + block) + 5, max_model_len // 2)
        self._prompt = [_FIRST_ID + (index * 37 + 11) % max(1, vocabulary - _FIRST_ID) for index in range(length)]
        # Long enough that it still runs when the lease is asked for, also where this process waits for a core.
        self._tokens = min(8 * block + 9, max_model_len - length - 1)

    def hear(self, event: EngineEvent) -> None:
        self._events.put_nowait(event)

    async def run(self) -> str:
        """Returns why the engine must not move anything; empty where the sequence did not notice."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._compare()
        except SelfTestFailed as failure:
            return f"self-test: {failure}"
        except TimeoutError:
            return f"self-test: no end within {PATIENCE_S:g} s"
        finally:
            self._engine.cancel(["self-test-source", "self-test-target"])
            self._engine.move(EndLeaseInEngine(migration=_MIGRATION, moved=False))
            self._engine.move(UnreserveInEngine(migration=_MIGRATION))
        return ""

    async def _compare(self) -> None:
        self._engine.add(self._sequence("self-test-alone"))
        expected = await self._ended("self-test-alone")
        self._engine.add(self._sequence("self-test-source"))
        await self._until(lambda: len(self._tokens_of("self-test-source")) >= 4)
        before = await self._move()
        moved = before + await self._ended("self-test-target")
        if moved != expected:
            at = next(
                (i for i, pair in enumerate(zip(moved, expected, strict=False)) if pair[0] != pair[1]), len(moved)
            )
            raise SelfTestFailed(f"tokens differ from number {at} on, after a move at {len(before)}")
        first = self._outputs["self-test-target"][0]
        if first.cached_tokens != len(self._prompt):
            raise SelfTestFailed(f"only {first.cached_tokens} of {len(self._prompt)} prompt tokens came with their KV")

    async def _move(self) -> list[int]:
        """Moves source to target; returns the tokens before that."""
        lease = LeaseInEngine(migration=_MIGRATION, sequence="self-test-source", from_block=0)
        leased: KvLeaseTaken = await self._ask(lease)
        await self._ask(
            ReserveInEngine(
                migration=_MIGRATION,
                sequence="self-test-target",
                endpoint=self._endpoint,
                token_ids=self._prompt,
                blocks=(len(self._prompt) + self._tokens) // self._endpoint.block_tokens + 1,
            )
        )
        await self._ask(
            PullIntoEngine(
                migration=_MIGRATION,
                from_block=0,
                blocks=leased.blocks,
                checksums=leased.checksums,
                until_ns=_NEVER_NS,
            )
        )
        have = len(leased.blocks)
        stopped: SequenceStopped = await self._ask(
            FreezeInEngine(migration=_MIGRATION, sequence="self-test-source", from_block=have)
        )
        handover = KvHandover(
            migration=_MIGRATION,
            endpoint=self._endpoint,
            from_block=have,
            blocks=stopped.blocks,
            computed_tokens=stopped.computed_tokens,
            read_ms=_READ_MS,
            checksums=stopped.checksums,
        )
        self._engine.add(self._sequence("self-test-target", stopped.output_token_ids, handover))
        await self._until(lambda: bool(self._tokens_of("self-test-target")))
        self._engine.move(EndLeaseInEngine(migration=_MIGRATION, moved=True))
        return stopped.output_token_ids

    def _sequence(
        self, name: str, output: list[int] | None = None, handover: KvHandover | None = None
    ) -> EngineSequence:
        sampling = Sampling(max_tokens=self._tokens, seed=11, temperature=1.0, ignore_eos=True)
        return EngineSequence(
            sequence=name,
            prompt_token_ids=self._prompt,
            sampling=sampling,
            output_token_ids=output or [],
            handover=handover,
        )

    # --- what the engine says

    async def _ask(self, command: KvCommand) -> Any:
        self._engine.move(command, match_prefix=False)
        while True:
            said = await self._next()
            if isinstance(said, KvDenied):
                raise SelfTestFailed(f"{type(command).__name__} was denied: {said.reason} {said.detail}")
            if isinstance(said, KvLeaseTaken | KvRoomReserved | KvBlocksRead | SequenceStopped):
                return said

    async def _ended(self, name: str) -> list[int]:
        await self._until(lambda: any(output.finish for output in self._outputs.get(name, ())))
        return self._tokens_of(name)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._next()

    async def _next(self) -> EngineEvent:
        event = await self._events.get()
        if isinstance(event, SequenceRejected):
            raise SelfTestFailed(f"a sequence was refused: {event.detail}")
        if isinstance(event, EngineFailed):
            raise SelfTestFailed(event.detail)
        if isinstance(event, EngineStepped):
            for output in event.outputs:
                self._outputs.setdefault(output.sequence, []).append(output)
        return event

    def _tokens_of(self, name: str) -> list[int]:
        return [token for output in self._outputs.get(name, ()) for token in output.token_ids]
