"""Roles and shapes for devices of several kinds: candidates are simulated, and the best one is chosen. Pure.

Every way to run the model on the devices is tried: per kind one shape (tensor parallel size), and of its instances
none, some or all prefill while the others decode, or all do both. The rating is the share of requests within the
objectives, then the mean end-to-end time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import msgspec
from millrace.contracts.plan import InstanceRole
from millrace.enginemodel.forecast.question import ReplicaRequest

from papers.flowkv.mix import InstanceShape, MixMember, serve_mix

#: More candidates are refused: each is a simulation.
CANDIDATES_MAX = 2_000


class AssignmentTargets(msgspec.Struct, frozen=True, kw_only=True):
    """Objectives of a request, seconds: time to its first token, and mean time per token after it."""

    ttft_s: float
    tpot_s: float

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, is {getattr(self, name)}")


class RatedAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate and what was simulated of it.

    Attributes:
        mix: Shapes and roles.
        within: Share of the requests within both objectives.
        ttft_s, tpot_s, e2e_s: Means.
    """

    mix: tuple[MixMember, ...]
    within: float
    ttft_s: float
    tpot_s: float
    e2e_s: float

    @property
    def name(self) -> str:
        """For example ``2 a100 prefill, 2 h200 decode``."""
        return ", ".join(f"{member.count} {member.shape.name} {member.role}" for member in self.mix)


def candidates(shapes: Sequence[InstanceShape], devices: Mapping[str, int]) -> list[tuple[MixMember, ...]]:
    """Every capable mix that uses all devices, in a fixed order.

    Args:
        shapes: Ways to run the model; those that need more devices of their kind than there are are left out.
        devices: Kind -> how many.

    Raises:
        ValueError: a kind has no shape that fits, or there are more than CANDIDATES_MAX.
    """
    ways = []
    for device, count in sorted(devices.items()):
        able = [shape for shape in shapes if shape.device == device and shape.devices <= count]
        if not able:
            raise ValueError(f"no shape fits on {count} devices of kind {device}")
        ways.append([split for shape in able for split in _splits(shape, count // shape.devices)])
    total = 1
    for way in ways:
        total *= len(way)
    if total > CANDIDATES_MAX:
        raise ValueError(f"{total} candidates; at most {CANDIDATES_MAX} are simulated: name fewer shapes or devices")
    found = [tuple(member for part in parts for member in part) for parts in product(*ways)]
    return [mix for mix in found if _capable(mix)]


def _splits(shape: InstanceShape, count: int) -> list[tuple[MixMember, ...]]:
    """All do both; or the first ones prefill and the others decode."""
    found: list[tuple[MixMember, ...]] = [(MixMember(shape, InstanceRole.BOTH, count),)]
    for prefills in range(count + 1):
        parts = ((InstanceRole.PREFILL, prefills), (InstanceRole.DECODE, count - prefills))
        found.append(tuple(MixMember(shape, role, number) for role, number in parts if number))
    return found


def _capable(mix: Sequence[MixMember]) -> bool:
    roles = {member.role for member in mix}
    return roles != {InstanceRole.PREFILL} and roles != {InstanceRole.DECODE}


def assign(
    requests: Sequence[ReplicaRequest],
    shapes: Sequence[InstanceShape],
    devices: Mapping[str, int],
    targets: AssignmentTargets,
) -> list[RatedAssignment]:
    """All candidates, the best one first; equal ones by their order.

    Args:
        requests: A sample of the load with its arrivals, at least one.
        devices: Kind -> how many.

    Raises:
        ValueError: no request, no candidate, or a request that fits in no instance.
    """
    if not requests:
        raise ValueError("no requests to simulate")
    rated = [rate(requests, mix, targets) for mix in candidates(shapes, devices)]
    if not rated:
        raise ValueError("no mix of these shapes can prefill and decode")
    return sorted(rated, key=lambda each: (-each.within, each.e2e_s))


def rate(requests: Sequence[ReplicaRequest], mix: tuple[MixMember, ...], targets: AssignmentTargets) -> RatedAssignment:
    """Simulate one candidate."""
    outcome = serve_mix(requests, mix)
    ttfts = [ns / 1e9 for ns in outcome.ttft_ns]
    ends = [ns / 1e9 for ns in outcome.e2e_ns]
    tpots = [
        (end - ttft) / max(1, request.output_tokens - 1)
        for ttft, end, request in zip(ttfts, ends, requests, strict=True)
    ]
    within = sum(t <= targets.ttft_s and p <= targets.tpot_s for t, p in zip(ttfts, tpots, strict=True))
    count = len(requests)
    return RatedAssignment(
        mix=mix,
        within=within / count,
        ttft_s=sum(ttfts) / count,
        tpot_s=sum(tpots) / count,
        e2e_s=sum(ends) / count,
    )
