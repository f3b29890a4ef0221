"""Configuration of the migrator."""

from __future__ import annotations

from typing import Annotated

import msgspec
from millrace.actor.config import ProcessConfig
from millrace.actor.config_marks import CONSTANT, WIRED
from millrace.contracts.migration import MigrationMode


class ReplicaConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV replicas of the instances' sequences: blocks copied ahead to another instance, for a continuation.

    Attributes:
        enabled: Whether there are any.
        tokens_min: Tokens in the cache from which on a sequence gets one.
        per_instance_max: Sequences of one instance that have one; the longest come first.
        bytes_per_s: Copied for one instance's sequences at most.
        interval_ms: Between two rounds of one sequence: as much as it decodes in this time is computed again.
    """

    enabled: Annotated[bool, WIRED] = False
    tokens_min: Annotated[int, WIRED] = 512
    per_instance_max: int = 16
    bytes_per_s: int = 256 * 1024 * 1024
    interval_ms: int = 500

    def __post_init__(self) -> None:
        for field in ("tokens_min", "per_instance_max", "bytes_per_s", "interval_ms"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, is {getattr(self, field)}")


class MigratorLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds and deadlines. Times in milliseconds, each for one migration.

    Attributes:
        rounds_max: Rounds of copying while the source decodes; then it freezes, whatever is left.
        pull_bytes_first: Copied with the first pull. Later ones are as large as what took a quarter of a lease so far:
            a pull must end well within one.
        pull_bytes_max: Copied with any pull.
        growth_blocks: Blocks reserved at the target beyond those that the sequence has.
        lease_ms: How long the source pins blocks after each renewal.
        freeze_ms: How long the source stands still at most before it goes on by itself: the pause that a client sees
            where the target dies in just that moment. Longer, by twice what the slowest answer took so far, where
            engines are in long steps: they answer between steps, and so does a freeze.
        copy_freeze_ms: The same for ``stop_and_copy`` and ``recompute``, which do more meanwhile; no freeze is longer,
            nor than the worker's own ``freeze_ms_max``: it goes on then, whatever its migrator believes.
        reserve_ms: How long the target keeps blocks reserved without news.
        answer_ms: For a worker or an ingress to answer what needs no copying.
        margin_ms: A deadline of the source is told to the target as so much earlier: the clocks of the three hosts may
            run at speeds that differ a little.
    """

    rounds_max: Annotated[Annotated[int, msgspec.Meta(ge=0)], CONSTANT] = 8
    pull_bytes_first: Annotated[Annotated[int, msgspec.Meta(ge=1)], CONSTANT] = 16 * 1024 * 1024
    pull_bytes_max: Annotated[Annotated[int, msgspec.Meta(ge=1)], CONSTANT] = 1024 * 1024 * 1024
    growth_blocks: Annotated[Annotated[int, msgspec.Meta(ge=0)], CONSTANT] = 4
    lease_ms: Annotated[int, msgspec.Meta(ge=1)] = 2_000
    freeze_ms: Annotated[int, msgspec.Meta(ge=1)] = 250
    copy_freeze_ms: Annotated[Annotated[int, msgspec.Meta(ge=1)], CONSTANT] = 2_000
    reserve_ms: Annotated[Annotated[int, msgspec.Meta(ge=1)], CONSTANT] = 2_000
    answer_ms: Annotated[Annotated[int, msgspec.Meta(ge=1)], CONSTANT] = 1_000
    margin_ms: Annotated[Annotated[int, msgspec.Meta(ge=0)], CONSTANT] = 20

    def __post_init__(self) -> None:
        if self.margin_ms * 2 > self.freeze_ms:
            raise ValueError(f"margin_ms must be at most half of freeze_ms, is {self.margin_ms} of {self.freeze_ms}")


class MigratorConfig(ProcessConfig, frozen=True, kw_only=True):
    """Configuration of a migrator process.

    Attributes:
        name: Unique name on the bus.
        instances: Instances that it moves sequences from; one, or those that share a worker process.
        mode: How KV travels where the asker does not say.
        replicas: Which sequences get a KV replica elsewhere.
    """

    name: Annotated[str, WIRED] = "migrator-0"
    instances: Annotated[list[str], WIRED]
    mode: MigrationMode = MigrationMode.LIVE
    limits: MigratorLimits = MigratorLimits()
    replicas: ReplicaConfig = ReplicaConfig()

    def __post_init__(self) -> None:
        if not self.instances or len(set(self.instances)) != len(self.instances):
            raise ValueError(f"instances must name at least one, each once; is {self.instances}")
