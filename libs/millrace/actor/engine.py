"""The Engine port: one inference engine behind a worker, real or modelled, and the effects and messages that pass
the border.

KV moves between engines by leases, freezes, reservations and pulls, in the words of contracts/kv.py and leases.py.

The worker actor returns AddToEngine and CancelInEngine; the shell carries them to an Engine; what the engine says
comes back as
SequenceAdded, SequenceRejected, EngineStepped, EngineObserved and EngineFailed. Contract suite: tests/contract/engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from millrace.actor.effects import Effect
from millrace.contracts.ingress import FinishReason, TokenLogprobs
from millrace.contracts.kv import CopierKind, KvHandover, KvRefusal
from millrace.contracts.leases import FrozenBlocks, LeasedBlocks, ReadBlocks, WantedRoom
from millrace.contracts.message import Body
from millrace.contracts.status import EngineDescription, EngineSnapshot
from millrace.contracts.worker import Adapter, Sampling


class EngineSequence(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence as an engine takes it. ``output_token_ids`` are tokens of earlier epochs: decoding goes on after
    them, with
    penalties, min_tokens, max_tokens, grammar and seeded noise as if it had never stopped.

    With ``handover`` its KV was pulled into a reservation of this engine, but for the rest that is read before its
    first step; what cannot be read in time, or fails its check, is recomputed. SequenceAdded follows when that read is
    over, well or not: whoever hears it may let the source go. The reservation ends with it; where there is none, the
    sequence is taken as one without a handover.
    """

    sequence: str
    prompt_token_ids: list[int]
    sampling: Sampling
    output_token_ids: list[int] = []
    arrival_ns: int = 0
    expected_output_tokens: int | None = None
    handover: KvHandover | None = None


class StepOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Output of one step for one sequence.

    Attributes:
        token_ids: New tokens, usually one; none where only ``finish`` is told.
        scheduled_ns: With the first output: unix ns when it first entered a batch; else 0.
        cached_tokens: With the first output: prompt tokens found in the prefix cache; else None.
        preemptions: How often this sequence was preempted so far.
        prompt_logprobs: With the first output: as in TokenChunk.
        pooled: As in TokenChunk; all of them come at once, with ``finish``.
    """

    sequence: str
    token_ids: list[int]
    finish: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    scheduled_ns: int = 0
    cached_tokens: int | None = None
    preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None
    pooled: list[bytes] | None = None


class AddToEngine(Effect, frozen=True, kw_only=True):
    """Gives a sequence to the engine: SequenceAdded or SequenceRejected follows."""

    sequence: EngineSequence


class CancelInEngine(Effect, frozen=True, kw_only=True):
    """Takes sequences out of the engine within one step. No further output for them; unknown ids are no error."""

    sequences: list[str]


class LimitStepInEngine(Effect, frozen=True, kw_only=True):
    """Bounds the tokens of the steps that are scheduled from now on. No answer: the next snapshots tell the bound.

    Attributes:
        tokens: At most; 0 for the engine's own budget. Never above that, nor below what `step_budget` allows.
    """

    tokens: int


class LoadInEngine(Effect, frozen=True, kw_only=True):
    """Loads a LoRA adapter from a folder, whatever has that name: AdapterLoaded or AdapterNotLoaded follows."""

    name: str
    path: str


class LeaseInEngine(Effect, frozen=True, kw_only=True):
    """Pins a running sequence's full blocks, or renews with those filled since: KvLeaseTaken or KvDenied follows.

    Preempting or ending the sequence ends the lease at once: its blocks are unpinned, and a later renewal or freeze is
    denied LEASE_LOST. The engine has no clock for leases: the worker ends them with EndLeaseInEngine.
    """

    migration: str
    sequence: str
    from_block: int


class FreezeInEngine(Effect, frozen=True, kw_only=True):
    """Stops a leased sequence after the step under way; its blocks, tail included, are pinned: SequenceStopped or
    KvDenied follows, after every output of it.
    """

    migration: str
    sequence: str
    from_block: int


class EndLeaseInEngine(Effect, frozen=True, kw_only=True):
    """Unpins. ``moved``: the sequence leaves the engine without a word. Else a frozen one decodes on where it stood.
    Unknown ones are no error; no answer.
    """

    migration: str
    moved: bool


class ReserveInEngine(Effect, WantedRoom, frozen=True, kw_only=True):
    """Takes idle blocks for a sequence to come, those of its prefix in the cache among them: KvRoomReserved or KvDenied
    follows. Blocks are taken from free ones only; nothing is preempted for it.

    With ``replica`` it takes no place in the batch, and the engine gives it up by itself, without a word, as soon as a
    sequence or another reservation lacks blocks; it is then as unknown as one that was never made. The newest goes
    first. Its blocks count as free in snapshots.
    """


class PullIntoEngine(Effect, frozen=True, kw_only=True):
    """Reads full blocks of the source into the reservation while decoding goes on: KvBlocksRead or KvDenied follows.

    Nothing that was pulled is found by the prefix cache before the sequence is added. ``until_ns`` is on this host's
    clock (unix ns): a read that ends later is denied LEASE_LOST. A replica's reservation grows with it, as far as
    blocks are free. ``lease`` as in PullKv.
    """

    migration: str
    from_block: int
    blocks: list[list[int]]
    checksums: list[list[int]]
    until_ns: int
    lease: str = ""


class UnreserveInEngine(Effect, frozen=True, kw_only=True):
    """Frees a reservation, ending a pull under way. Unknown ones are no error; no answer."""

    migration: str


class KvLeaseTaken(Body, LeasedBlocks, frozen=True, kw_only=True, tag="local.KvLeaseTaken/1"):
    """Blocks are pinned."""


class SequenceStopped(Body, FrozenBlocks, frozen=True, kw_only=True, tag="local.SequenceStopped/1"):
    """A sequence stands still. ``output_token_ids`` are all of them, earlier epochs included."""


class KvRoomReserved(Body, frozen=True, kw_only=True, tag="local.KvRoomReserved/1"):
    """Blocks are reserved. Fields as in MigrationPrepared."""

    migration: str
    matched_blocks: int
    copier: CopierKind


class KvBlocksRead(Body, ReadBlocks, frozen=True, kw_only=True, tag="local.KvBlocksRead/1"):
    """A pull is done."""


class KvDenied(Body, frozen=True, kw_only=True, tag="local.KvDenied/1"):
    """The engine's no to LeaseInEngine, FreezeInEngine, ReserveInEngine or PullIntoEngine.

    A denied lease renewal, freeze or pull leaves lease or reservation as it was, but for LEASE_LOST.
    """

    migration: str
    reason: KvRefusal
    detail: str = ""


def denied(command: KvCommand, reason: KvRefusal, detail: str = "") -> KvDenied:
    """The engine's no to this command."""
    return KvDenied(migration=command.migration, reason=reason, detail=detail)


class SequenceAdded(Body, frozen=True, kw_only=True, tag="local.SequenceAdded/1"):
    """The engine took the sequence. ``kv_tokens``: those whose KV it brought, of one with a handover; else 0."""

    sequence: str
    kv_tokens: int = 0


class SequenceRejected(Body, frozen=True, kw_only=True, tag="local.SequenceRejected/1"):
    """The engine refuses the parameters."""

    sequence: str
    detail: str


class AdapterLoaded(Body, frozen=True, kw_only=True, tag="local.AdapterLoaded/1"):
    """The engine has it. Said as well of one that came with a sequence."""

    adapter: Adapter


class AdapterNotLoaded(Body, frozen=True, kw_only=True, tag="local.AdapterNotLoaded/1"):
    """The answer to LoadInEngine where it failed. ``missing``: there is no adapter at that path."""

    name: str
    path: str
    detail: str
    missing: bool = False


class EngineStepped(Body, frozen=True, kw_only=True, tag="local.EngineStepped/1"):
    """One step ended. ``snapshot`` may be None where the engine had none ready; a later one then covers it."""

    step: int
    at_ns: int
    outputs: list[StepOutput]
    snapshot: EngineSnapshot | None = None


class EngineObserved(Body, frozen=True, kw_only=True, tag="local.EngineObserved/1"):
    """A snapshot without outputs: after a cancel, or of an idle engine when asked."""

    snapshot: EngineSnapshot


#: Age at which an engine's sign of life is overdue. Engines give one about every 50 ms, also during a step.
SIGN_OVERDUE_NS = 250_000_000


class EngineLiveness(Body, frozen=True, kw_only=True, tag="local.EngineLiveness/1"):
    """Signs that an engine hangs, said when one begins or ends.

    Attributes:
        silent_since_ns: Unix ns of the engine process's last sign of life, where one is overdue; 0 while it is alive.
        step_since_ns: Unix ns at which the step under way began, where it is a long one; 0 otherwise.
    """

    silent_since_ns: int
    step_since_ns: int


class EngineFailed(Body, frozen=True, kw_only=True, tag="local.EngineFailed/1"):
    """The engine is dead; every sequence in it is lost."""

    detail: str


EngineEvent = (
    SequenceAdded
    | SequenceRejected
    | AdapterLoaded
    | AdapterNotLoaded
    | EngineStepped
    | EngineObserved
    | EngineLiveness
    | EngineFailed
    | KvLeaseTaken
    | SequenceStopped
    | KvRoomReserved
    | KvBlocksRead
    | KvDenied
)
KvCommand = LeaseInEngine | FreezeInEngine | EndLeaseInEngine | ReserveInEngine | PullIntoEngine | UnreserveInEngine


class Engine(Protocol):
    """One inference engine. All methods are called, and the listener is called back, on one event loop thread."""

    async def start(self, listener: Callable[[EngineEvent], None]) -> EngineDescription:
        """Starts it. Raises EngineStartFailed with the engine's reason."""
        ...

    def add(self, sequence: EngineSequence) -> None:
        """Adds a sequence; the listener hears SequenceAdded or SequenceRejected."""
        ...

    def cancel(self, sequences: list[str]) -> None:
        """Cancels sequences within one step; their blocks are free in the next snapshot."""
        ...

    def load_adapter(self, name: str, path: str) -> None:
        """Loads a LoRA adapter. Not called where ``EngineDescription.adapters`` is None."""
        ...

    def move(self, command: KvCommand) -> None:
        """Carries out what concerns leases and reservations; answers come to the listener. One command per migration
        at a time, but for EndLeaseInEngine and UnreserveInEngine, which may come at any time. An engine whose
        ``EngineDescription.kv`` is None denies each with UNABLE.
        """
        ...

    def limit_step(self, tokens: int) -> None:
        """Bounds the tokens of the next steps; 0 for the engine's own budget. An engine that cannot change it keeps it,
        and its snapshots tell no bound.
        """
        ...

    async def stop(self) -> None:
        """Ends the engine and its process. Idempotent."""
        ...
