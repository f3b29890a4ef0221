"""State that instances and services publish about themselves: snapshots, summaries, presence, registration."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from millrace.contracts.kv import KvEndpoint
from millrace.contracts.message import Body
from millrace.contracts.scheduler import SchedulerConfig
from millrace.contracts.worker import Adapter


class SequenceState(StrEnum):
    """State of a sequence in its engine."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"


class SequenceStatus(msgspec.Struct, frozen=True, array_like=True):
    """One sequence in an engine. Lengths in tokens.

    Attributes:
        computed_tokens: Tokens whose KV is in the engine's cache.
        blocks: KV blocks held.
        expected_output_tokens: Predicted length of the whole output; None if unknown. As submitted, until the instance
            knows better (``expected_at``).
        immovable: Why it cannot be migrated (what of it cannot be carried); empty where it can.
        expected_p90: Length that the whole output stays within with a probability of 0.9; None if unknown.
        expected_at: Output tokens when the instance itself made this estimate; None for a submitted one.
    """

    sequence: str
    state: SequenceState
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    max_tokens: int
    blocks: int
    arrival_ns: int
    expected_output_tokens: int | None = None
    immovable: str = ""
    expected_p90: int | None = None
    expected_at: int | None = None


class BatchComposition(msgspec.Struct, frozen=True, array_like=True):
    """Composition of the batch that one engine step computed.

    Attributes:
        decodes: Sequences that decoded one token.
        prefills: Sequences that had a prompt chunk.
        prefill_tokens: Prompt tokens computed, summed over chunks.
        context_tokens: Sum over all sequences in the batch of their context length after the step.
        prefill_work: Sum over chunks of chunk * (cached + chunk / 2), tokens squared: what prefill attention costs.
        prefill_context_tokens: The share of ``context_tokens`` that belongs to sequences with a prompt chunk.
        longest_context: Context length after the step of the longest decoding sequence; 0 where not gathered.
    """

    decodes: int = 0
    prefills: int = 0
    prefill_tokens: int = 0
    context_tokens: int = 0
    prefill_work: float = 0.0
    prefill_context_tokens: int = 0
    longest_context: int = 0


class EngineTotals(msgspec.Struct, frozen=True, array_like=True):
    """Sums over all steps of an engine since its start. Two of them give rates.

    Attributes:
        steps: Steps computed.
        busy_ns: Time in steps.
        decodes: Sequences that decoded one token.
        prefill_tokens: Prompt tokens computed, those of recomputed sequences included.
        context_tokens: As in BatchComposition.
    """

    steps: int = 0
    busy_ns: int = 0
    decodes: int = 0
    prefill_tokens: int = 0
    context_tokens: int = 0


class PhaseQueues(msgspec.Struct, frozen=True, array_like=True):
    """Sequences of one phase at an instance. A sequence is in prefill until its first output token.

    Attributes:
        running: In the running batch.
        waiting: In the queue, never computed or not since they came.
        preempted: In the queue after they had run here.
        moving: Prefill: sequences whose KV leaves. Decode: sequences whose KV arrives.
    """

    running: int = 0
    waiting: int = 0
    preempted: int = 0
    moving: int = 0


class LoadIndicators(msgspec.Struct, frozen=True, array_like=True):
    """Load indicators of an instance, as a policy on roles knows them.

    Token budget used, KV use, busy time and memory bandwidth follow from ``totals``, the summary and the record.

    Attributes:
        prefill_tokens_left: Prompt tokens that running and waiting sequences still have to compute.
        longest_wait_ns: Age of the oldest sequence that waits in prefill; 0 for none.
        blocks_growing: KV blocks that all sequences here are expected to need beyond those that they hold.
    """

    prefill: PhaseQueues = PhaseQueues()
    decode: PhaseQueues = PhaseQueues()
    prefill_tokens_left: int = 0
    longest_wait_ns: int = 0
    blocks_growing: int = 0
    totals: EngineTotals = EngineTotals()


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """State of an engine after a step.

    Attributes:
        step: Engine step number, rising; equal numbers mean nothing was computed since.
        at_ns: Unix ns of the snapshot.
        running: In the engine's running order.
        waiting: In the engine's queue order, preempted ones included.
        preemptions: Since the engine's start.
        step_duration_ns: Of the last step; 0 before the first.
        batch: Of the last step.
        totals: Over all steps.
        token_budget: Of the next steps, where it is bounded below the record's; 0 where it is not.
    """

    step: int
    at_ns: int
    running: list[SequenceStatus]
    waiting: list[SequenceStatus]
    blocks_free: int
    blocks_total: int
    preemptions: int
    step_duration_ns: int
    batch: BatchComposition
    totals: EngineTotals = EngineTotals()
    token_budget: int = 0


class StatusSnapshot(Body, EngineSnapshot, frozen=True, kw_only=True, tag="StatusSnapshot/1"):
    """Everything a scheduler can know about an instance after one step; at least every 250 ms."""

    instance: str
    incarnation: int
    model: str


class InstanceSummary(Body, frozen=True, kw_only=True, tag="InstanceSummary/1"):
    """The small form of a snapshot, and the instance's heartbeat: at least every 250 ms, at most every 25 ms.

    Ingress needs no more than this; full snapshots go to predictors and brokers (docs/decisions/0002).

    Attributes:
        running: Sequences in the running batch.
        waiting: Sequences in the queue.
        running_tokens: Context tokens of the running batch.
        waiting_prefill_tokens: Prompt tokens (outputs of preempted ones included) that the queue still has to
            compute.
        output_tokens_total: Since start, for rates.
        draining: Takes no new work.
        engine_silent_ns: Age of the engine process's last sign of life where one is overdue; 0 while it is alive.
        step_age_ns: Time since the engine step under way began, where it is a long one (a quarter of a second or
            more); 0 otherwise.
        step_longest_ns: Longest step of the last minute; 0 where none ended.
        indicators: Queues by phase and totals; None from workers that do not tell them.
        token_budget: As in EngineSnapshot.
    """

    instance: str
    incarnation: int
    model: str
    at_ns: int
    running: int
    waiting: int
    running_tokens: int
    waiting_prefill_tokens: int
    blocks_free: int
    blocks_total: int
    block_size: int
    preemptions: int
    output_tokens_total: int
    draining: bool = False
    engine_silent_ns: int = 0
    step_age_ns: int = 0
    step_longest_ns: int = 0
    indicators: LoadIndicators | None = None
    token_budget: int = 0


class EngineDescription(SchedulerConfig, frozen=True, kw_only=True):
    """Properties of an engine, known once it has started, with the configuration of its scheduler.

    Attributes:
        engine: ``vllm`` or ``modelled``.
        engine_version: For example ``0.32.0``.
        step_time: Which step-time parameters fit this engine: a set that ships, or a path; empty where unknown.
        kv: Where its KV lies and how it can be read; None for an engine that moves nothing.
        kv_refusal: Why it moves nothing; empty where it does.
        adapters: LoRA adapters that it has loaded; others it loads when a sequence comes with one. None where it takes
            none.
        task: Of vLLM's pooling tasks the one that it computes; empty for a model that generates text.
    """

    model: str
    engine: str
    engine_version: str
    engine_pid: int = 0
    step_time: str = ""
    kv: KvEndpoint | None = None
    kv_refusal: str = ""
    adapters: list[Adapter] | None = None
    task: str = ""


class InstanceRecord(Body, EngineDescription, frozen=True, kw_only=True, tag="InstanceRecord/1"):
    """Registration of an instance in the KV bucket ``instance`` (key: its name; re-put within the bucket's TTL).

    Attributes:
        incarnation: Start time of the worker process, unix ns. A new one means that all earlier sequences there
            are lost.
        shape: Device kind and tensor parallel size, such as ``cpu`` or ``h100x2``; empty where unknown.
    """

    instance: str
    incarnation: int
    host: str = ""
    pid: int = 0
    shape: str = ""


class PresenceState(StrEnum):
    """Whether a service is there."""

    ALIVE = "alive"
    LEAVING = "leaving"
    DEAD = "dead"  # said of a service by the supervisor that saw its process end


class InstanceMigrations(msgspec.Struct, frozen=True, array_like=True):
    """Numbers of sequences that are on their way from an instance, as its migrator counts them.

    Attributes:
        leaving: Sequences that are being moved away.
        replicated: Sequences of it that have a KV replica at another instance.
    """

    instance: str
    leaving: int
    replicated: int = 0


class MigrationStatus(msgspec.Struct, frozen=True, array_like=True):
    """One migration under way, as its source's migrator sees it.

    Attributes:
        step: What it waits for: ``leasing``, ``allotting``, ``preparing``, ``pulling``, ``renewing``, ``freezing``,
            ``committing``.
        round: Rounds of copying that are done.
        began_ns: Unix ns, by the clock of ``ServicePresence.at_ns``.
        bytes: Copied so far.
    """

    sequence: str
    source: str
    target: str
    step: str
    round: int
    began_ns: int
    bytes: int


class DrainedInstance(msgspec.Struct, frozen=True, array_like=True):
    """An instance that an operator has drained; it runs no more and waits to be started again."""

    instance: str
    model: str


class ServicePresence(Body, frozen=True, kw_only=True, tag="ServicePresence/2"):
    """Heartbeat of a service, every second; the supervisor says DEAD for a child whose process ended.

    Attributes:
        role: ``ingress``, ``tagger``, ``coordinator``, ``worker``, ...
        name: Unique name of the process's actor, for example ``ingress-0``. For workers the instance's name.
        incarnation: Start time of the process, unix ns. With DEAD: 0 where unknown (any incarnation up to ``at_ns``).
        moving: Of a migrator: its instances from which anything moves or is replicated.
        migrations: Of a migrator: those away from its instances that are under way, oldest first; no more than it
            tells of at once.
        instances: Of a broker: the instances that it acts for.
        drained: Of a supervisor: instances that an operator has drained.
        trouble: Of an ingress: what it cannot serve, and why. Of a supervisor: what is wrong with its store or disk.
        store: Of a supervisor: reason why the store takes no writes until its disk has room, so that no instance can
            register; empty where it does.
        host: Of a supervisor: name under which it is asked to start and stop instances.
    """

    role: str
    name: str
    incarnation: int
    at_ns: int
    state: PresenceState = PresenceState.ALIVE
    url: str = ""
    instances: list[str] = []
    moving: list[InstanceMigrations] = []
    migrations: list[MigrationStatus] = []
    drained: list[DrainedInstance] = []
    trouble: str = ""
    store: str = ""
    host: str = ""
