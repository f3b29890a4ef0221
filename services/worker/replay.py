"""Builds the actor of a recording again, for `millrace replay`."""

from __future__ import annotations

import random

import msgspec
from millrace.actor.engine import EngineInfo
from millrace.actor.recording import Origin
from millrace.contracts.subjects import Subjects

from services.worker.actor import WorkerActor
from services.worker.config import MigrationConfig, WorkerLimits
from services.worker.reports import Identity


class WorkerOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker's actor is made of. What the engine says afterwards is in its recorded inbox."""

    identity: Identity
    info: EngineInfo
    limits: WorkerLimits
    cluster: str
    migration: MigrationConfig = MigrationConfig()


def origin_of(
    identity: Identity, info: EngineInfo, limits: WorkerLimits, *, cluster: str, migration: MigrationConfig
) -> Origin:
    """What a recording of this actor says about it."""
    made = WorkerOrigin(identity=identity, info=info, limits=limits, cluster=cluster, migration=migration)
    return Origin(config=msgspec.json.encode(made).decode(), seed=identity.incarnation)


def worker_rng(instance: str, incarnation: int) -> random.Random:
    """The actor's source of span ids."""
    return random.Random(f"{instance}-{incarnation}")


def replay_actor(config: str, seed: int) -> WorkerActor:
    """The actor as it was when the recording began."""
    made = msgspec.json.decode(config, type=WorkerOrigin)
    return WorkerActor(
        identity=made.identity,
        info=made.info,
        subjects=Subjects(made.cluster),
        limits=made.limits,
        rng=worker_rng(made.identity.instance, seed),
        migration=made.migration,
    )
