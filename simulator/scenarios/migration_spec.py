"""Migration in a scenario: its settings, and the parts that it builds: migrators, and the network that carries KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from millrace.actor.config import BusConfig
from millrace.contracts.bounds import Count, Span, Wait
from millrace.contracts.kv import KvEndpoint
from millrace.contracts.migration import MigrationMode
from millrace.contracts.plan import InstanceRole
from millrace.enginemodel.network import TOKEN_BYTES, modelled_endpoint
from millrace.enginemodel.parameters import EngineParameters
from millrace.sim.kv_network import SimKvNetwork
from millrace.sim.runtime_sim import MICROSECOND, Simulation

from services.migrator.config import MigratorConfig, MigratorLimits, ReplicaConfig
from services.worker.config import MigrationConfig, ReplicaBounds

#: A migrator is called so, with the first of its instances behind it.
PREFIX = "migrator-"


class MigrationSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Migration of running sequences between instances. When off, nothing here has an effect, roles included.

    Attributes:
        on: A migrator and a broker for each instance, and engines whose KV others may read.
        bandwidth_gbps: Of each host's network card in each direction, Gb/s; transfers share it.
        local_gbps: Inside a host, shared by its transfers, Gb/s.
        latency_us: Before the first byte of each read.
        token_bytes: KV of one token over all layers and ranks; the default is Llama-3-8B's in 16 bits.
        roles: By group or instance (which wins); who is not named does both.
        mode: How KV travels.
        limits: Of each migrator.
        replicas: KV replicas of running sequences elsewhere.
        replica_share: Share of each instance's KV blocks that replicas of others may take.
        instances_each: Instances that share a migrator and a broker: 1, or those of a host.
    """

    on: bool = False
    bandwidth_gbps: Span = 100.0
    local_gbps: Span = 400.0
    latency_us: Wait = 30.0
    token_bytes: Count = TOKEN_BYTES
    roles: dict[str, InstanceRole] = {}
    mode: MigrationMode = MigrationMode.LIVE
    limits: MigratorLimits = MigratorLimits()
    replicas: ReplicaConfig = ReplicaConfig()
    replica_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.25
    instances_each: Count = 1

    def complaint(self, instances: Mapping[str, tuple[str, ...]]) -> str:
        """Return the first error, with the field's name; empty if there is none. ``instances``: names by group."""
        known = {*instances, *(name for names in instances.values() for name in names)}
        for name in self.roles:
            if name not in known:
                return f"migration.roles: {name!r} is neither a group nor an instance"
        return ""

    def instance_roles(self, instances: Mapping[str, tuple[str, ...]]) -> dict[str, InstanceRole]:
        """For the coordinators: roles by instance. ``instances``: names by group."""
        if not self.on:
            return {}
        by_group = {name: self.roles[group] for group in instances if group in self.roles for name in instances[group]}
        single = {name for names in instances.values() for name in names}
        return {**by_group, **{name: role for name, role in self.roles.items() if name in single}}

    def network(self, simulation: Simulation) -> SimKvNetwork | None:
        """Build the network that carries KV between the engines; None if migration is off."""
        if not self.on:
            return None
        latency_ns = int(self.latency_us * MICROSECOND)
        return SimKvNetwork(
            simulation,
            bytes_per_s=self.bandwidth_gbps * 1e9 / 8,
            local_bytes_per_s=self.local_gbps * 1e9 / 8,
            latency_ns=latency_ns,
        )

    def endpoint(self, engine: EngineParameters, *, key: str, model: str, host: str = "") -> KvEndpoint | None:
        """Return the endpoint of an engine's KV; None if migration is off. ``host``: empty for a host of its own."""
        if not self.on:
            return None
        return modelled_endpoint(engine, key=key, model=model, machine=host, token_bytes=self.token_bytes)

    def worker_bounds(self) -> MigrationConfig:
        """For the workers: their own bounds, or what the migrators' limits ask for where that is more."""
        bounds, limits = MigrationConfig(), self.limits
        return MigrationConfig(
            lease_ms_max=max(bounds.lease_ms_max, limits.lease_ms),
            freeze_ms_max=max(bounds.freeze_ms_max, limits.freeze_ms, limits.copy_freeze_ms),
            reserve_ms_max=max(bounds.reserve_ms_max, limits.reserve_ms),
            replicas=ReplicaBounds(memory_share=self.replica_share if self.replicas.enabled else 0.0),
        )

    def migrator(self, instances: Sequence[str], bus: BusConfig) -> MigratorConfig:
        return MigratorConfig(
            name=PREFIX + instances[0],
            instances=list(instances),
            mode=self.mode,
            limits=self.limits,
            replicas=self.replicas,
            bus=bus,
        )
