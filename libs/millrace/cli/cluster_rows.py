"""Rows of the tables that status and top show."""

from __future__ import annotations

import msgspec

from millrace.contracts.plan import InstanceRole


class InstanceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One instance.

    Attributes:
        state: ``ready``, ``draining``, ``drained`` (by an operator; it runs no more), ``suspect`` (no heartbeat),
            ``dead`` or ``starting`` (registered, nothing heard yet).
        output_tokens_per_s: None while fewer than two summaries were heard.
        uptime_s: Since the worker process started.
        role: ``both``, ``prefill`` or ``decode``, as the plan says.
        kv: Ways to read its KV, best first; empty where it moves nothing.
        kv_refusal: Why it moves nothing.
        shape: Device kind and tensor parallel size; empty where it does not say.
        leaving, arriving: Sequences that move away from it and to it, as its migrator said last.
        replicated: Those that have a KV replica at another instance.
    """

    instance: str
    model: str
    stage: str
    state: str
    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    output_tokens_per_s: float | None = None
    output_tokens: int = 0
    preemptions: int = 0
    uptime_s: float = 0.0
    role: str = InstanceRole.BOTH
    kv: list[str] = []
    kv_refusal: str = ""
    shape: str = ""
    leaving: int = 0
    arriving: int = 0
    replicated: int = 0


class MigrationRow(msgspec.Struct, frozen=True, kw_only=True):
    """One migration under way, as its source's migrator said last.

    Attributes:
        target: Empty while none is chosen.
        step: As in MigrationStatus.
        round: Rounds of copying that are done.
    """

    sequence: str
    source: str
    target: str
    step: str
    round: int
    age_s: float
    bytes: int


class ServiceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One service.

    Attributes:
        state: ``alive``, ``leaving``, ``dead`` or ``silent``.
        trouble: What an ingress cannot serve, or what is wrong with a supervisor's machine; else empty.
    """

    role: str
    name: str
    state: str
    url: str
    uptime_s: float
    heard_s_ago: float
    trouble: str = ""


class LoadSums(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over instances that are heard from."""

    running: int
    waiting: int
    blocks_used: int
    blocks_total: int
    output_tokens_per_s: float


class StageRow(LoadSums, frozen=True, kw_only=True):
    """One stage of a plan, with the sums of its instances.

    Attributes:
        length_min, length_max: Lengths that it serves now, tokens: its boundaries as they were refined last. No
            ``length_max`` for the last stage.
        covered_by: The stage that serves its lengths while it has no instance; else empty.
        leaving, arriving: Sequences that move away from its instances and to them.
    """

    model: str
    stage: str
    length_min: int
    length_max: int | None
    covered_by: str
    instances: int
    leaving: int
    arriving: int


class Totals(LoadSums, frozen=True, kw_only=True):
    """Sums over all instances."""

    instances: int
    instances_ready: int
    preemptions: int
    migrations: int
