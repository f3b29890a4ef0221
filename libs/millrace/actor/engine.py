"""The Engine port: one inference engine behind a worker, real or modelled, and the effects and messages that pass
the border.

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
from millrace.contracts.message import Body
from millrace.contracts.status import BatchComposition, SequenceStatus
from millrace.contracts.worker import Sampling


class EngineSequence(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence as an engine takes it. ``output_token_ids`` are tokens of earlier epochs: decoding goes on after
    them, with
    penalties, min_tokens, max_tokens, grammar and seeded noise as if it had never stopped.
    """

    sequence: str
    prompt_token_ids: list[int]
    sampling: Sampling
    output_token_ids: list[int] = []
    arrival_ns: int = 0
    priority: int = 0
    expected_output_tokens: int | None = None


class StepOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one step gave one sequence.

    Attributes:
        token_ids: New tokens, usually one; none where only ``finish`` is told.
        scheduled_ns: With the first output: unix ns when it first entered a batch; else 0.
        cached_tokens: With the first output: prompt tokens found in the prefix cache; else None.
        preemptions: How often this sequence was preempted so far.
    """

    sequence: str
    token_ids: list[int]
    finish: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    scheduled_ns: int = 0
    cached_tokens: int | None = None
    preemptions: int = 0


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """State of an engine after a step; see StatusSnapshot for the fields."""

    step: int
    at_ns: int
    running: list[SequenceStatus]
    waiting: list[SequenceStatus]
    blocks_free: int
    blocks_total: int
    preemptions: int
    step_duration_ns: int
    batch: BatchComposition


class AddToEngine(Effect, frozen=True, kw_only=True):
    """Gives a sequence to the engine: SequenceAdded or SequenceRejected follows."""

    sequence: EngineSequence


class CancelInEngine(Effect, frozen=True, kw_only=True):
    """Takes sequences out of the engine within one step. No further output for them; unknown ids are no error."""

    sequences: list[str]


class SequenceAdded(Body, frozen=True, kw_only=True, tag="local.SequenceAdded/1"):
    """The engine took the sequence."""

    sequence: str


class SequenceRejected(Body, frozen=True, kw_only=True, tag="local.SequenceRejected/1"):
    """The engine refuses the parameters."""

    sequence: str
    detail: str


class EngineStepped(Body, frozen=True, kw_only=True, tag="local.EngineStepped/1"):
    """One step ended. ``snapshot`` may be None where the engine had none ready; a later one then covers it."""

    step: int
    at_ns: int
    outputs: list[StepOutput]
    snapshot: EngineSnapshot | None = None


class EngineObserved(Body, frozen=True, kw_only=True, tag="local.EngineObserved/1"):
    """A snapshot without outputs: after a cancel, or of an idle engine when asked."""

    snapshot: EngineSnapshot


class EngineFailed(Body, frozen=True, kw_only=True, tag="local.EngineFailed/1"):
    """The engine is dead; every sequence in it is lost."""

    detail: str


EngineEvent = SequenceAdded | SequenceRejected | EngineStepped | EngineObserved | EngineFailed


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine offers, known once it has started; see InstanceRecord for the fields."""

    engine: str
    engine_version: str
    model: str
    max_model_len: int
    max_sequences: int
    token_budget: int
    block_size: int
    blocks_total: int
    engine_pid: int = 0
    long_prefill_token_threshold: int = 0
    chunked_prefill: bool = True
    prefix_caching: bool = True
    watermark: float = 0.0
    reserve_full_prompt: bool = True
    queue_policy: str = "fcfs"
    async_scheduling: bool = False
    step_time: str = ""


class Engine(Protocol):
    """One inference engine. All methods are called, and the listener is called back, on one event loop thread."""

    async def start(self, listener: Callable[[EngineEvent], None]) -> EngineInfo:
        """Starts it. Raises EngineStartFailed with the engine's reason."""
        ...

    def add(self, sequence: EngineSequence) -> None:
        """Adds a sequence; the listener hears SequenceAdded or SequenceRejected."""
        ...

    def cancel(self, sequences: list[str]) -> None:
        """Cancels sequences within one step; their blocks are free in the next snapshot."""
        ...

    async def stop(self) -> None:
        """Ends the engine and its process. Idempotent."""
        ...
