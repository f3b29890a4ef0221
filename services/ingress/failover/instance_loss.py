"""Loss of an instance: tells each sequence that it had, and each migration to it; some are suspects.

Whatever a request does to one engine (a crash, a hang, silence) is not tried on a second one. So the few sequences that
came last and had not decoded a token are *suspects*: they may have caused it. All others fail over at once, also those
that waited behind a full batch: an engine begins sequences in their order, as places get free.

    the instance died            a suspect is dispatched alone, on an idle instance (``dispatch/trial.py``);
                                 it is none after 4 s where the whole process ended
    it is silent, or hangs       a suspect stays there: if the instance is heard again, it goes on and is none
    for HOLD_NS                  it is dispatched alone, too, until the instance is heard again
    it is lost in its trial      it is refused (``poison.py``)
    its first token              it is none

Silence of two instances in a row without a new token is rather a machine with too much to do, where another move would
only compute the sequence anew: it stays, with each move in vain twice as long.

An engine hangs whose process gives no sign of life while its worker goes on publishing summaries:

    age of the last sign        consequence
    hang_s                      no new sequence is dispatched there (``cluster/instances.py``); sequences that wait
                                  there for their first token fail over, but for suspects
    hang_failover_s             its streams fail over
    it speaks again             it is used again; what it still decodes of moved sequences is stale

A sequence stays where no other instance could take it.
"""

from __future__ import annotations

from services.ingress.cluster.instances import KnownInstance
from services.ingress.dispatch.candidates import has_alternative
from services.ingress.lifecycle import InstanceLost, LossCause, SequencePhase, TargetLost
from services.ingress.sequence import OpenSequence
from services.ingress.state import IngressState
from services.ingress.times import MILLISECOND_NS, SECOND_NS

#: Suspects of one loss: at many requests a second others are waiting by then, and nobody waits for their trials.
SUSPECTS_MAX = 8
#: How long suspects stay with a silent instance, and what was moved in vain twice.
HOLD_NS = 3 * SECOND_NS
#: A sequence that came so long after the last sign of life was not taken up any more. Summaries come more often.
SIGN_NS = 250 * MILLISECOND_NS


def mark_suspects(state: IngressState, instance: KnownInstance, last_sign_ns: int | None = None) -> None:
    """Mark what may have caused the loss of an instance: the last that it may have begun, without a token ever."""
    until_ns = state.now_ns if last_sign_ns is None else last_sign_ns + SIGN_NS
    owned = state.owned.get(instance.name, {}).values()
    waiting = sorted((s for s in owned if s.fresh and not s.moved and s.placed_ns <= until_ns), key=_placed)
    free = instance.view.sequences_max - sum(not s.fresh or s.moved for s in owned)
    begun = set(waiting[: max(1, free)] if instance.view.sequences_max else waiting)
    young = [s for s in waiting if not s.log and (s in begun or s is waiting[-1] or _read_at_once(s))]
    for sequence in young[-SUSPECTS_MAX:]:
        sequence.retry.suspect = True


def _read_at_once(sequence: OpenSequence) -> bool:
    """Whether an engine works on it as it comes: a grammar, an adapter to load, images."""
    sampling = sequence.call.call.sampling
    return bool(sampling.structured or sampling.adapter or sampling.images)


def _placed(sequence: OpenSequence) -> int:
    return sequence.placed_ns


def clear_suspects(state: IngressState, instance: KnownInstance) -> None:
    """The instance is heard again: what stayed there, or left it as silent, did nothing to it that lasts."""
    for sequence in state.owned.get(instance.name, {}).values():
        sequence.retry.suspect = False
    for retry in (sequence.retry for sequence in state.waiting.values()):
        if retry.why == "instance_silent" and retry.excluded.get(instance.name) == instance.member.incarnation:
            retry.suspect = False


def lose_silent(state: IngressState, instances: list[KnownInstance]) -> None:
    """Fail over what instances have that have just fallen silent, and suspects that stayed with a silent one."""
    event = InstanceLost("instance_silent", LossCause.ENGINE_SILENT)
    for instance in instances:
        mark_suspects(state, instance, instance.member.heard_ns)
        lose_instance(state, instance, event)
    for name in list(state.owned):
        instance = state.cluster.instances[name]
        if instance.dead and instance.member.silence_ns(state.now_ns) > HOLD_NS:
            lose_instance(state, instance, event)


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
    if event.cause is LossCause.ENGINE_DIED:
        mark_suspects(state, instance)
    for sequence in list(state.owned.get(instance.name, {}).values()):
        if sequence.phase is SequencePhase.ENDED:  # its call was given up by an earlier one
            continue
        silence_ns = instance.member.silence_ns(state.now_ns)
        if event.cause is LossCause.ENGINE_SILENT and silence_ns <= _patience_ns(sequence):
            continue
        if before_incarnation is None or sequence.incarnation < before_incarnation:
            state.fire(sequence, event)
    for sequence in list(state.granted.get(instance.name, {}).values()):
        grant = sequence.grant
        if grant is not None and (before_incarnation is None or grant.incarnation < before_incarnation):
            state.fire(sequence, TargetLost())


def _patience_ns(sequence: OpenSequence) -> int:
    """Least time that a sequence stays with a silent instance, or engine."""
    in_vain = sequence.retry.fruitless
    if sequence.retry.suspect:
        return HOLD_NS
    return HOLD_NS << in_vain - 2 if in_vain > 1 else 0


def lose_earlier_incarnation(state: IngressState, name: str) -> None:
    """A new incarnation showed itself: fail over what the earlier one had."""
    instance = state.cluster.instances[name]
    event = InstanceLost("instance_restarted", LossCause.ENGINE_DIED)
    lose_instance(state, instance, event, before_incarnation=instance.member.incarnation)


# Hung engines.


def leave_hung_engines(state: IngressState) -> None:
    """Fail over sequences of hung engines. Called with each tick, and when a summary shows a hang."""
    for instance in state.cluster.hung():
        if instance.name in state.owned:
            _leave(state, instance)


def _leave(state: IngressState, instance: KnownInstance) -> None:
    silent_ns = instance.silent_ns(state.now_ns)
    if silent_ns:
        mark_suspects(state, instance, state.now_ns - silent_ns)
    for sequence in list(state.owned[instance.name].values()):
        if sequence.phase is SequencePhase.ENDED or sequence.instance is not instance:
            continue  # its call was given up by an earlier one
        limit_ns = state.times.hang_failover if _streams(sequence) else state.times.hang
        if silent_ns >= max(limit_ns, _patience_ns(sequence)) and has_alternative(state, sequence):
            state.fire(sequence, InstanceLost("instance_hung", LossCause.ENGINE_SILENT))


def _streams(sequence: OpenSequence) -> bool:
    """Whether its instance has decoded a token of it, or got it by a migration."""
    return sequence.phase is SequencePhase.RUNNING and (sequence.moved or not sequence.fresh)
