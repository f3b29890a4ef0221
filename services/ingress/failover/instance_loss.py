"""Loss of an instance: tells each sequence that it had, and each migration to it."""

from __future__ import annotations

from services.ingress.cluster.instances import KnownInstance
from services.ingress.lifecycle import InstanceLost, LossCause, SequencePhase, TargetLost
from services.ingress.state import IngressState


def lose_instance(
    state: IngressState,
    instance: KnownInstance,
    event: InstanceLost,
    *,
    before_incarnation: int | None = None,
) -> None:
    """Fail over everything that an instance has (or that an incarnation before the given one had), and give up
    migrations to it.
    """
    for sequence in list(state.owned.get(instance.name, {}).values()):
        if sequence.phase is SequencePhase.ENDED:  # its call was given up by an earlier one
            continue
        if before_incarnation is None or sequence.incarnation < before_incarnation:
            state.fire(sequence, event)
    for sequence in list(state.granted.get(instance.name, {}).values()):
        grant = sequence.grant
        if grant is not None and (before_incarnation is None or grant.incarnation < before_incarnation):
            state.fire(sequence, TargetLost())


def lose_earlier_incarnation(state: IngressState, name: str) -> None:
    """A new incarnation showed itself: fail over what the earlier one had."""
    instance = state.cluster.instances[name]
    event = InstanceLost("instance_restarted", LossCause.ENGINE_DIED)
    lose_instance(state, instance, event, before_incarnation=instance.member.incarnation)
