"""Assignment of instances to stages: a join or a leave moves no other instance.

If a stage changed its range, running sequences would have to move. An instance that changes its stage drains by growth
of its sequences, which takes minutes. Instances therefore keep their stages as long as the cuts stay. When the cuts
change, each takes the stage that overlaps most with its old one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from millrace.contracts.plan import InstanceRole, Stage

#: Ranges end here when their overlap is compared, tokens: longer than any sequence that is served today.
LENGTH_MAX = 1 << 24


class StageShape(msgspec.Struct, frozen=True, kw_only=True):
    """One stage as a planner sees it: a range and a number of instances.

    Attributes:
        length_min: First length served, tokens.
        length_max: First length no longer served; None for no bound.
        instances: At least 1.
    """

    length_min: int
    length_max: int | None
    instances: int


def assign(
    shapes: Sequence[StageShape],
    instances: Iterable[str],
    *,
    previous: Sequence[Stage] = (),
    homes: Mapping[str, int] | None = None,
    hosts: Mapping[str, str] | None = None,
    pins: Mapping[str, int] | None = None,
) -> list[list[str]]:
    """Distributes instances over the stages of a new or an unchanged layout.

    Args:
        shapes: Layout, rising ranges that tile [0, inf).
        previous: Stages of the plan in force; empty for none.
        homes: Instance -> stage index of this layout in which it served before it left; used for those that are in no
            stage of ``previous``.
        hosts: Instance -> host. A new layout spreads each stage over the hosts, so that the next longer stage has an
            instance on the same host.
        pins: Instance -> index of the stage that the configuration gives it.

    Returns:
        Sorted names per shape. Every instance stands in exactly one list; lists may be empty where instances are few.
    """
    pinned = {name: index for name, index in (pins or {}).items() if index < len(shapes)}
    names = sorted(set(instances) - set(pinned))
    members: list[list[str]] = [[] for _ in shapes]
    for name in sorted(set(instances) & set(pinned)):
        members[pinned[name]].append(name)
    same = [(s.length_min, s.length_max) for s in shapes] == [(s.length_min, s.length_max) for s in previous]
    placed = _keep(members, names, previous) if same else _carry_over(members, names, shapes, previous)
    rest = _HostQueues([name for name in names if name not in placed], hosts or {})
    for name, home in sorted((homes or {}).items()):
        if home < len(shapes) and rest.take(name):
            members[home].append(name)
    while rest.left:
        neediest = members[_neediest(members, shapes)]
        neediest.append(rest.pop(neediest))
    return [sorted(each) for each in members]


def stages_of(
    shapes: Sequence[StageShape], members: Sequence[Sequence[str]], roles: Mapping[str, InstanceRole]
) -> list[Stage]:
    """Stages of a plan.

    Args:
        roles: Role of each instance; those with BOTH may be left out.
    """
    held = [bool(each) for each in members]
    return [
        Stage(
            name=f"s{index}",
            length_min=shape.length_min,
            length_max=shape.length_max,
            instances=list(names),
            roles={n: roles[n] for n in names if roles.get(n, InstanceRole.BOTH) is not InstanceRole.BOTH},
            instances_wanted=shape.instances,
            covered_by=_cover(index, held),
        )
        for index, (shape, names) in enumerate(zip(shapes, members, strict=True))
    ]


def _cover(index: int, held: Sequence[bool]) -> str:
    """Name of the stage that covers an empty one: the next longer that has instances, else the nearest shorter."""
    if held[index] or not any(held):
        return ""
    order = [*range(index + 1, len(held)), *range(index - 1, -1, -1)]
    return f"s{next(other for other in order if held[other])}"


def _keep(members: list[list[str]], names: Sequence[str], previous: Sequence[Stage]) -> set[str]:
    serving = set(names)
    for index, stage in enumerate(previous):
        members[index] += [name for name in stage.instances if name in serving]
    return {name for each in members for name in each}


def _carry_over(
    members: list[list[str]], names: Sequence[str], shapes: Sequence[StageShape], previous: Sequence[Stage]
) -> set[str]:
    """Moves members of old stages to new ones, the greatest overlap of ranges first, up to the numbers wanted."""
    serving = set(names)
    left = [[name for name in stage.instances if name in serving] for stage in previous]
    pairs = [
        (-_overlap(old.length_min, old.length_max, new.length_min, new.length_max), i, j)
        for i, old in enumerate(previous)
        for j, new in enumerate(shapes)
    ]
    for negative, i, j in sorted(pairs):
        room = shapes[j].instances - len(members[j])
        if negative < 0 and room > 0:
            members[j] += left[i][:room]
            left[i] = left[i][room:]
    return {name for each in members for name in each}


def _overlap(a_min: int, a_max: int | None, b_min: int, b_max: int | None) -> float:
    """Width of the intersection of two ranges in octaves."""
    low = max(a_min, b_min, 1)
    high = min(a_max or LENGTH_MAX, b_max or LENGTH_MAX)
    return max(0.0, math.log2(high / low)) if high > low else 0.0


def _neediest(members: Sequence[Sequence[str]], shapes: Sequence[StageShape]) -> int:
    """Index of the stage with the smallest share of the instances that it should have; the shorter one on a tie."""
    shares = [len(each) / shape.instances for each, shape in zip(members, shapes, strict=True)]
    return shares.index(min(shares))


class _HostQueues:
    """Instances without a stage, by host."""

    def __init__(self, names: Sequence[str], hosts: Mapping[str, str]) -> None:
        self._hosts = hosts
        self._queues: dict[str, list[str]] = {}
        for name in sorted(names, reverse=True):
            self._queues.setdefault(hosts.get(name, ""), []).append(name)
        self.left = len(names)

    def take(self, name: str) -> bool:
        """Removes an instance; False where it is not here."""
        queue = self._queues.get(self._hosts.get(name, ""), [])
        if name not in queue:
            return False
        queue.remove(name)
        self.left -= 1
        return True

    def pop(self, members: Sequence[str]) -> str:
        """Removes an instance of the host that has the fewest members in a stage."""
        counts = Counter(self._hosts.get(name, "") for name in members)
        _, _, host = min((counts[host], -len(queue), host) for host, queue in self._queues.items() if queue)
        self.left -= 1
        return self._queues[host].pop()
