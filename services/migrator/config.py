"""Configuration of the migrator."""

from __future__ import annotations

from typing import Any

import msgspec
from millrace.actor.config import BusConfig, TelemetryConfig
from millrace.actor.errors import ConfigError
from millrace.contracts.migration import MigrationMode
from millrace.membership import MembershipConfig
from millrace.policies.migration import TARGET_POLICIES, TargetPolicy
from millrace.policies.registry import PolicyError


class TargetConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Choice of a target where the asker names none.

    Attributes:
        policy: A name of ``TARGET_POLICIES``.
        parameters: The policy's parameters.
    """

    policy: str = "most_idle"
    parameters: dict[str, Any] = {}


class ReplicaConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV replicas of the instances' sequences: blocks copied ahead to another instance, for a continuation.

    Attributes:
        enabled: Whether there are any.
        tokens_min: Tokens in the cache from which on a sequence gets one.
        per_instance_max: Sequences of one instance that have one; the longest come first.
        bytes_per_s: Copied for one instance's sequences at most.
        interval_ms: Between two rounds of one sequence: as much as it decodes in this time is computed again.
    """

    enabled: bool = False
    tokens_min: int = 512
    per_instance_max: int = 16
    bytes_per_s: int = 256 * 1024 * 1024
    interval_ms: int = 500

    def __post_init__(self) -> None:
        """Refuses what cannot be. Raises ValueError naming the field."""
        for field in ("tokens_min", "per_instance_max", "bytes_per_s", "interval_ms"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, is {getattr(self, field)}")


class MigratorLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds and deadlines. Times in milliseconds, each for one instance and one migration.

    Attributes:
        out_max: Migrations away from an instance at a time; asked ones beyond it wait.
        queued_max: Asked ones that wait; beyond it they are refused TOO_MANY.
        targets_max: Targets tried for one migration, where the asker names none.
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
        answer_ms: For a worker, a migrator or an ingress to answer what needs no copying.
        margin_ms: A deadline of the source is told to the target as so much earlier: the clocks of the three hosts may
            run at speeds that differ a little.
        retry_ms: Pause before a sequence that cannot move yet, or found no room, is tried again.
    """

    out_max: int = 3
    queued_max: int = 256
    targets_max: int = 3
    rounds_max: int = 8
    pull_bytes_first: int = 16 * 1024 * 1024
    pull_bytes_max: int = 1024 * 1024 * 1024
    growth_blocks: int = 4
    lease_ms: int = 2_000
    freeze_ms: int = 250
    copy_freeze_ms: int = 2_000
    reserve_ms: int = 2_000
    answer_ms: int = 1_000
    margin_ms: int = 20
    retry_ms: int = 50

    def __post_init__(self) -> None:
        """Refuses what cannot be. Raises ValueError naming the field."""
        least = {"rounds_max": 0, "growth_blocks": 0, "margin_ms": 0}
        for field in self.__struct_fields__:
            if getattr(self, field) < least.get(field, 1):
                raise ValueError(f"{field} must be at least {least.get(field, 1)}, is {getattr(self, field)}")
        if self.margin_ms * 2 > self.freeze_ms:
            raise ValueError(f"margin_ms must be at most half of freeze_ms, is {self.margin_ms} of {self.freeze_ms}")


class MigratorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of a migrator process.

    Attributes:
        name: Unique name on the bus.
        instances: Instances that it moves sequences from and to; one, or those that share a worker process.
        mode: How KV travels where the asker does not say.
        target: How a target is chosen.
        replicas: Which sequences get a KV replica elsewhere.
        membership: When an instance, or a broker, counts as silent.
        record: File for the actor's inbox and effects, for ``millrace replay``; empty for none.
    """

    name: str = "migrator-0"
    instances: list[str]
    mode: MigrationMode = MigrationMode.LIVE
    limits: MigratorLimits = MigratorLimits()
    target: TargetConfig = TargetConfig()
    replicas: ReplicaConfig = ReplicaConfig()
    bus: BusConfig = BusConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    membership: MembershipConfig = MembershipConfig()
    record: str = ""

    def __post_init__(self) -> None:
        """Refuses what cannot be. Raises ValueError naming the field."""
        if not self.instances or len(set(self.instances)) != len(self.instances):
            raise ValueError(f"instances must name at least one, each once; is {self.instances}")


def target_policy(config: TargetConfig) -> tuple[TargetPolicy, msgspec.Struct]:
    """The chosen policy and its parameters.

    Raises:
        ConfigError: there is no such policy, or a parameter is wrong.
    """
    try:
        return TARGET_POLICIES.choose(config.policy, config.parameters)
    except PolicyError as error:
        raise ConfigError(f"target.{error}") from None
