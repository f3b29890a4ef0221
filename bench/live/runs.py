"""Plays loads to the policies in turn on one cluster, and keeps what came of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from millrace.policies.registry import policy_name

from bench.live.listen import Listener, listening
from bench.live.plan import Kind, Load, planned
from bench.live.play import flood, play
from bench.live.recording import Recording
from bench.live.rig import MachineWatch, PolicyRig

#: Pause before each run, so that nothing of the one before is under way.
PAUSE_S = 1.0


class Campaign(msgspec.Struct, frozen=True, kw_only=True):
    """Description of the runs.

    Attributes:
        policies: The first is played first in each round: with lengths that are guessed, the tagger then has not met
            the round's prompts yet.
        kinds: Loads of each round.
        count: Requests of each run.
        rounds: Repetitions, each with arrivals and prompts of its own.
        utilisation: Share of the measured capacity that is offered.
        rate_per_s: Offered instead, where it is not 0.
        workers: What each worker is told of its own, fields of WorkerConfig; one per engine.
    """

    policies: tuple[str, ...]
    kinds: tuple[Kind, ...]
    count: int
    rounds: int
    utilisation: float
    rate_per_s: float
    load: Load
    workers: tuple[dict[str, Any], ...] = ({}, {})
    flood_count: int = 300
    flood_at_once: int = 40


async def run_all(rig: PolicyRig, campaign: Campaign, say: Callable[[str], None]) -> list[Recording]:
    """Every policy on every load of every round."""
    recordings = []
    async with listening(rig.up.folder) as listener:
        capacities = {kind: await capacity(rig, campaign, kind, listener) for kind in campaign.kinds}
        for number in range(campaign.rounds):
            for kind in campaign.kinds:
                load = load_of(campaign, kind, number, capacities[kind])
                for policy in order(campaign, kind, number):
                    recording = await one(rig, listener, policy, load, number, capacities[kind])
                    say(f"{kind} {number} {policy}: {len(recording.outcomes)} ended; {recording.machine}")
                    recordings.append(recording)
    return recordings


def order(campaign: Campaign, kind: Kind, number: int) -> tuple[str, ...]:
    """Policies of a round, rotated; not where the first has to be first (see Campaign)."""
    shift = number % len(campaign.policies) if kind == "stated" else 0
    return campaign.policies[shift:] + campaign.policies[:shift]


def load_of(campaign: Campaign, kind: Kind, number: int, capacity_per_s: float) -> Load:
    """A round's load, at the share of capacity that is wanted."""
    rate = campaign.rate_per_s or campaign.utilisation * capacity_per_s
    seed = campaign.load.seed + 1 + number
    return msgspec.structs.replace(campaign.load, kind=kind, count=campaign.count, rate_per_s=rate, seed=seed)


async def capacity(rig: PolicyRig, campaign: Campaign, kind: Kind, listener: Listener) -> float:
    """Requests per second that the cluster serves when there is always work; warms everything up besides."""
    load = msgspec.structs.replace(campaign.load, kind=kind, count=campaign.flood_count, rate_per_s=1.0)
    policy = "join_shortest_queue" if "join_shortest_queue" in rig.ports else campaign.policies[0]
    rate = await flood(planned(load), port=rig.ports[policy], model=rig.model, at_once=campaign.flood_at_once)
    await asyncio.sleep(PAUSE_S)
    listener.take()
    return rate


async def one(
    rig: PolicyRig, listener: Listener, policy: str, load: Load, number: int, capacity_per_s: float
) -> Recording:
    """One policy on one load."""
    await asyncio.sleep(PAUSE_S)
    listener.take()
    watch = MachineWatch(rig)
    began_ns = time.time_ns()
    played = await play(planned(load), port=rig.ports[policy], model=rig.model)
    await listener.settle(sum(not each.error for each in played))
    machine = watch.words()
    decisions, outcomes, snapshots = listener.take()
    return Recording(
        policy=policy_name(policy),
        load=load,
        round=number,
        capacity_per_s=capacity_per_s,
        machine=machine,
        began_ns=began_ns,
        instances=await listener.instances(),
        decisions=decisions,
        outcomes=outcomes,
        snapshots=snapshots,
        played=played,
    )


def record(folder: Path, *, model_path: Path, engine: str, campaign: Campaign) -> list[Recording]:
    """Starts a cluster in ``folder`` and runs the campaign on it."""
    policies, workers = campaign.policies, campaign.workers
    with PolicyRig(folder, model_path=model_path, engine=engine, policies=policies, workers=workers) as rig:
        return asyncio.run(run_all(rig, campaign, lambda text: print(f"  {text}", flush=True)))
