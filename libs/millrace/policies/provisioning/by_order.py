"""Scaling by an operator's order: which instances begin or end so that there are so many of a shape and a role. Pure.

Those that end are chosen by what has to leave them: the fewest KV bytes first, then the youngest. A stage keeps one
instance that prefills and one that decodes. How long an instance may take to be empty follows from what it holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from millrace.contracts.coordinator import OrderRefusal
from millrace.contracts.plan import InstanceRole

#: Instances that one order may start or stop.
ORDER_MAX = 64

#: Of a move, what does not depend on its bytes, seconds: a handshake of eight messages between loaded processes.
MOVE_S = 0.25

#: Moves away from an instance at a time, as migrators allow by default.
MOVES_AT_ONCE = 3

#: The computed time is doubled, for targets that are busy, and never below this, seconds: a broker looks twice a
#: second, and snapshots are up to 250 ms old.
MARGIN = 2.0
LEAST_S = 2.0


class ScalableInstance(msgspec.Struct, frozen=True, kw_only=True):
    """One instance that serves.

    Attributes:
        since_ns: When its process started, unix ns.
        sequences: Of the running batch; those that wait hold no KV and are handed back.
        context_tokens: Of the running batch.
        token_bytes: KV bytes of one token; 0 where nothing moves away from it.
        stoppable: False where no provisioner can stop it.
    """

    name: str
    stage: str
    role: InstanceRole = InstanceRole.BOTH
    shape: str = ""
    since_ns: int = 0
    sequences: int = 0
    context_tokens: int = 0
    token_bytes: float = 0.0
    stoppable: bool = True


class ScaleQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """An order and the model's instances.

    Attributes:
        count: Instances of the shape and role that shall serve.
        shape: Empty for any.
        role: None for any.
        instances: All that serve, in order of name.
    """

    count: int
    shape: str
    role: InstanceRole | None
    instances: Sequence[ScalableInstance]


class ScaleAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers and names of instances to start and stop; or a refusal, and then neither."""

    start: int = 0
    stop: tuple[str, ...] = ()
    refusal: OrderRefusal | None = None
    detail: str = ""


def scale(question: ScaleQuestion) -> ScaleAnswer:
    """Instances to start or stop; a refusal where the order makes no sense or a phase of a stage would have nobody."""
    named = [each for each in question.instances if _is_meant(each, question)]
    missing = question.count - len(named)
    if question.count < 0 or abs(missing) > ORDER_MAX:
        detail = f"{question.count} instances: from 0, and {ORDER_MAX} more or fewer than the {len(named)} at most"
        return ScaleAnswer(refusal=OrderRefusal.INVALID, detail=detail)
    if missing >= 0:
        return ScaleAnswer(start=missing, detail=f"{len(named)} serve")
    return _fewer(question, named, -missing)


def _fewer(question: ScaleQuestion, named: Sequence[ScalableInstance], surplus: int) -> ScaleAnswer:
    left, chosen = list(question.instances), list[str]()
    for each in sorted(named, key=lambda each: (each.context_tokens * each.token_bytes, -each.since_ns, each.name)):
        if len(chosen) == surplus:
            break
        others = [other for other in left if other is not each]
        if each.stoppable and _capable([other for other in others if other.stage == each.stage]):
            left, chosen = others, [*chosen, each.name]
    if len(chosen) < surplus:
        detail = f"of {len(named)} only {len(chosen)} may end: each stage keeps one that prefills and one that decodes"
        unstoppable = [each.name for each in named if not each.stoppable]
        detail += f", and nobody can stop {', '.join(unstoppable)}" if unstoppable else ""
        return ScaleAnswer(refusal=OrderRefusal.NOT_CAPABLE, detail=detail)
    return ScaleAnswer(stop=tuple(chosen), detail=f"{len(named)} serve")


def _is_meant(each: ScalableInstance, question: ScaleQuestion) -> bool:
    return question.shape in ("", each.shape) and question.role in (None, each.role)


def _capable(stage: Sequence[ScalableInstance]) -> bool:
    prefills = any(each.role is not InstanceRole.DECODE for each in stage)
    return prefills and any(each.role is not InstanceRole.PREFILL for each in stage)


def emptying_s(instance: ScalableInstance, *, bytes_per_s: float) -> float | None:
    """Longest time until everything that an instance runs has moved away, seconds; None where nothing can move.

    Args:
        bytes_per_s: Of one KV transfer.
    """
    if not instance.token_bytes:
        return None
    copying_s = instance.context_tokens * instance.token_bytes / bytes_per_s
    return LEAST_S + MARGIN * (copying_s + instance.sequences * MOVE_S / MOVES_AT_ONCE)
