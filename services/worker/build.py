"""Builds the worker's actor."""

from __future__ import annotations

import msgspec
from millrace.actor.deps import ActorDeps
from millrace.contracts.status import EngineDescription
from millrace.contracts.subjects import Subjects

from services.worker.actor import WorkerActor
from services.worker.config import MigrationConfig, WorkerLimits
from services.worker.identity import Identity


class WorkerOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker's actor is made of: what its process was configured with, and what its engine said at start."""

    identity: Identity
    info: EngineDescription
    limits: WorkerLimits
    cluster: str
    migration: MigrationConfig = MigrationConfig()


def build(config: WorkerOrigin, deps: ActorDeps) -> WorkerActor:
    """The actor of an instance. Its incarnation is its identity's."""
    return WorkerActor(
        identity=config.identity,
        info=config.info,
        subjects=Subjects(config.cluster),
        limits=config.limits,
        rng=deps.rng,
        migration=config.migration,
    )
