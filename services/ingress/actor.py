"""Core of an ingress: sole owner of open calls, their token logs, admission, and the choice of instances.

    message in           change                                       messages out
    TokensGenerated      logs grow, text comes out, choices end        DeliverDeltas, CompleteCall; ResendTokens
    CallSubmitted        admitted or refused                           TagRequest | PredictLatency |
                                                                         SubmitSequence | RefuseCall
    CallAbandoned        the call is gone                              CancelSequence, RequestFinished
    Gathered             predictions known, as far as they arrived     SubmitSequence
    AdapterAsked         nothing; see adapters.py                      ChangeAdapter
    Replied,             tag known; sequence accepted, refused or      SubmitSequence, AcceptCall, RefuseCall
      RequestFailed        unanswered; tokens resent
    InstanceSummary      instance alive, its view replaced             SubmitSequence of what waited for it
    BoundaryMoved        where a stage ends now
    KeyChanged           plan, registration, plan of a cascade         the same
    ServicePresence      DEAD: everything it had fails over            SubmitSequence (failover)
    SequencesReturned    these fail over                               SubmitSequence (failover)
    FindRequests         nothing                                      RequestsFound
    AllotEpoch           a migration's target may decode in it        EpochAllotted, KvRefused; CancelSequence
    SequenceMoved        the target owns it, or the source went on    CancelSequence, ResendTokens
    BusDisconnected,     detectors freeze, then ask what was missed;   ResendTokens, RefuseCall, FailCall
      BusReconnected       calls are ended after a time
    TimerFired           deadlines, silence, stalls, retries,          FailCall, ResendTokens, AcknowledgeSequences,
                           acknowledgements, presence                    ServicePresence
    StopRequested        nothing new is admitted; calls end in time,   ServicePresence LEAVING, at the end Stop
                         at once where the supervisor is gone

A call of a cascade (``cascade/``) is a parent whose attempts are calls of its models: each is tagged, dispatched,
continued and ended as above, and its course goes to the parent, not to the client.

Invariants: an admitted call ends in exactly one of RefuseCall, FailCall, CompleteCall, or CallAbandoned; a sequence
changes its state only by an event of ``lifecycle.py``; it has one epoch at a time, raised with each submission and
migration, and at most one instance in it; besides it at most one epoch is granted to a migration's target, above it,
whose tokens count from the moment that the target is proven to continue this very log; no epoch is ever used twice; the
log only grows (but for what follows a stop string); what a client saw is what the log says.

When overloaded: calls and sequences beyond the configured numbers are refused QUEUE_FULL before anything is kept of
them; calls that wait for an instance count among them and wait for a bounded time.
"""

from __future__ import annotations

import sys
from typing import Any

from millrace.actor.effects import Effect, Publish, Reply, StartTimer, Stop, Subscribe, WatchKeys
from millrace.contracts.broker import BoundaryMoved
from millrace.contracts.cascade import CascadePlan
from millrace.contracts.catalog import Role
from millrace.contracts.ingress import FindRequests, RequestsFound, ReturnReason, SequencesReturned, TokensGenerated
from millrace.contracts.local import (
    BucketReady,
    BusDisconnected,
    BusReconnected,
    Gathered,
    KeyChanged,
    Replied,
    RequestFailed,
    StopRequested,
    TimerFired,
)
from millrace.contracts.message import Body, ErrorReply, Message
from millrace.contracts.migration import AllotEpoch, KvReplicated, SequenceMoved
from millrace.contracts.plan import Plan
from millrace.contracts.status import InstanceRecord, InstanceSummary, PresenceState, ServicePresence
from millrace.membership.heartbeat import Heartbeat

from services.ingress import inspection
from services.ingress.adapters import AdapterAsked, ask_adapter
from services.ingress.calls.admission import open_call, refusal_of
from services.ingress.calls.completion import (
    ACKNOWLEDGE_TIMER,
    end_cut_off_calls,
    end_late_calls,
    refuse,
    refuse_or_fail,
    send_acknowledgements,
)
from services.ingress.calls.messages import Call, CallAbandoned, CallSubmitted, RefusalKind
from services.ingress.cascade.reactions import abandon_call, interrupt, open_cascade, settle, take_cascade_plan
from services.ingress.config import IngressConfig
from services.ingress.dispatch.dispatcher import DISPATCH_TIMER, dispatch_new, dispatch_waiting
from services.ingress.failover.instance_loss import (
    clear_suspects,
    leave_hung_engines,
    lose_earlier_incarnation,
    lose_instance,
    lose_silent,
    mark_suspects,
)
from services.ingress.failover.resend import ask_after_outage, look_at_sequences
from services.ingress.lifecycle import InstanceLost, LossCause, TargetLost
from services.ingress.migration.epoch_grants import grant_epoch, granted_to
from services.ingress.migration.ownership import take_move
from services.ingress.migration.replicas import take_replica
from services.ingress.reply_router import take_gathered, take_reply
from services.ingress.state import IngressDeps, IngressState
from services.ingress.times import MILLISECOND_NS, RECONNECT_GRACE_NS, SECOND_NS
from services.ingress.tokens.ingest import ingest_tokens
from services.ingress.transitions import react

#: Bus messages that the runtime hands over; anything else is refused there.
ACCEPTS: tuple[type[Body], ...] = (
    TokensGenerated,
    SequencesReturned,
    InstanceSummary,
    ServicePresence,
    BoundaryMoved,
    AllotEpoch,
    FindRequests,
    SequenceMoved,
    KvReplicated,
)

#: Interval of the checks of deadlines and silence: a sixth of the shortest of them (1.5 s).
TICK_NS = 250 * MILLISECOND_NS
#: Ticks between two checks of every sequence (probes, stalls): limits there are seconds.
TICKS_PER_LOOK = 4
#: Heartbeat of this ingress; workers give an ingress up after five missing ones.
PRESENCE_NS = 1 * SECOND_NS

_TICK = "tick"
_PRESENCE = "presence"
_GRACE = "grace"


class IngressActor:
    """One ingress. Its shell carries out the effects of calls/messages.py and sends CallSubmitted and CallAbandoned."""

    def __init__(self, config: IngressConfig, deps: IngressDeps) -> None:
        self._state = IngressState(config, deps)
        self._state.bind(react)
        self._heartbeat = Heartbeat(
            subjects=self._state.subjects,
            role=Role.INGRESS,
            name=self._state.name,
            incarnation=deps.incarnation,
            url=config.http.address,
        )
        self._ticks = self._tick_ns = 0
        self._stopped = False
        self._stop_detail = "This server is going down."

    @property
    def name(self) -> str:
        return self._state.name

    @property
    def state(self) -> IngressState:
        return self._state

    def start(self, now_ns: int) -> list[Effect]:
        state = self._state
        state.now_ns = now_ns
        self._tick_ns = now_ns + TICK_NS
        subjects = state.subjects
        return [
            Subscribe(subject=subjects.tokens(state.name)),
            Subscribe(subject=subjects.returned(state.name)),
            Subscribe(subject=subjects.epoch(state.name)),
            Subscribe(subject=subjects.moved(state.name)),
            Subscribe(subject=subjects.replicated(state.name)),
            Subscribe(subject=subjects.find()),
            Subscribe(subject=subjects.summaries()),
            Subscribe(subject=subjects.presences(Role.WORKER.value)),
            Subscribe(subject=subjects.presences(Role.SUPERVISOR.value)),
            Subscribe(subject=subjects.boundaries()),
            WatchKeys(bucket="instance"),
            WatchKeys(bucket="plan"),
            WatchKeys(bucket="cascade"),
            StartTimer(name=_TICK, at_ns=self._tick_ns),
            self._presence(PresenceState.ALIVE),
            StartTimer(name=_PRESENCE, at_ns=now_ns + PRESENCE_NS),
        ]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        self._state.now_ns = now_ns
        match body := message.body:
            case TokensGenerated():
                ingest_tokens(self._state, body)
            case CallSubmitted():
                self._on_call(body.call)
            case Replied() | RequestFailed():
                take_reply(self._state, body)
            case Gathered():
                take_gathered(self._state, body)
            case InstanceSummary():
                self._on_summary(body)
            case BoundaryMoved():
                self._state.cluster.take_boundary(body)
            case AdapterAsked():
                ask_adapter(self._state, body)
            case CallAbandoned():
                abandon_call(self._state, body)
            case ServicePresence():
                self._on_presence(body)
            case SequencesReturned():
                self._on_returned(body)
            case AllotEpoch():
                grant_epoch(self._state, body, message.reply_to)
            case FindRequests():
                self._on_find(body, message.reply_to)
            case SequenceMoved():
                take_move(self._state, body)
            case KvReplicated():
                take_replica(self._state, body)
            case KeyChanged():
                self._on_key(body)
            case BucketReady(bucket="plan"):
                self._state.cluster.plans_read = True
            case TimerFired():
                self._on_timer(body)
            case BusDisconnected():
                self._state.connected, self._state.lost_ns = False, now_ns
            case BusReconnected():
                self._on_reconnected()
            case StopRequested():
                self._on_stop(body)
            case _:
                if message.reply_to:
                    detail = f"an ingress takes no {type(body).__name__}"
                    self._state.emit(Reply(to=message.reply_to, body=ErrorReply(reason="unexpected", detail=detail)))
        settle(self._state)
        if self._state.stopping:
            self._stop_when_idle()
        return self._state.take_effects()

    # Life of a call: admitted, tagged, dispatched.

    def _on_call(self, call: Call) -> None:
        state = self._state
        assert call.request not in state.calls, f"request id {call.request} is open already"
        refusal = refusal_of(state, call)
        if refusal is not None:
            refuse(state, call, refusal)
        elif call.members:
            open_cascade(state, call)
        else:
            dispatch_new(state, open_call(state, call))

    # Instances and plans.

    def _on_summary(self, summary: InstanceSummary) -> None:
        state = self._state
        known = state.cluster.instances.get(summary.instance)
        was_usable = known is not None and known.usable
        if state.cluster.take_summary(summary, state.now_ns):
            lose_earlier_incarnation(state, summary.instance)
        if was_usable and known is not None and known.hang:
            leave_hung_engines(state)
        if not was_usable and state.cluster.instances[summary.instance].usable:
            clear_suspects(state, state.cluster.instances[summary.instance])
            if state.cluster.came_whole(summary.instance):
                dispatch_waiting(state, all_of_them=True)

    def _on_key(self, change: KeyChanged) -> None:
        state = self._state
        value = change.value
        if change.bucket == "plan" and (value is None or isinstance(value, Plan)):
            state.cluster.take_plan(change.key, value)
        elif (
            change.bucket == "instance"
            and (value is None or isinstance(value, InstanceRecord))
            and state.cluster.take_record(change.key, value, state.now_ns)
        ):
            lose_earlier_incarnation(state, value.instance if value is not None else change.key)
        elif change.bucket == "cascade" and (value is None or isinstance(value, CascadePlan)):
            take_cascade_plan(state, change.key, value)
        if state.waiting and (change.bucket != "instance" or state.cluster.came_whole(change.key)):
            dispatch_waiting(state, all_of_them=True)

    def _on_presence(self, presence: ServicePresence) -> None:
        state = self._state
        if presence.role == Role.SUPERVISOR:
            if presence.store != state.cluster.store_ill:
                state.cluster.store_ill = presence.store
                dispatch_waiting(state, all_of_them=True)
            return
        ended = state.cluster.take_presence(presence)
        if ended is not None:
            lose_instance(state, ended, InstanceLost("instance_dead", LossCause.ENGINE_DIED))

    def _on_returned(self, message: SequencesReturned) -> None:
        state = self._state
        instance = state.cluster.instances.get(message.instance)
        if instance is None or instance.member.incarnation != message.incarnation:
            return
        if message.reason is not ReturnReason.REQUESTED:
            state.cluster.withdraw(instance)
        cause = LossCause.ENGINE_DIED if message.reason is ReturnReason.ENGINE_DIED else LossCause.OTHER
        if cause is LossCause.ENGINE_DIED:
            mark_suspects(state, instance)
        for name, epoch in message.sequences:
            sequence = state.sequences.get(name)
            if sequence is None:
                continue
            if sequence.epoch == epoch and sequence.instance is instance:
                state.fire(sequence, InstanceLost(f"returned_{message.reason.value}", cause))
            elif granted_to(sequence, epoch, instance):
                state.fire(sequence, TargetLost())

    def _on_find(self, body: FindRequests, reply_to: str) -> None:
        """Answer with the open requests of that client id; nothing is sent where none is open here."""
        state = self._state
        found = [call.request for call in state.calls.values() if call.call.client_id == body.client_id]
        if found and body.client_id and reply_to:
            state.emit(Reply(to=reply_to, body=RequestsFound(ingress=state.name, requests=found)))

    # Time and the bus.

    def _on_timer(self, fired: TimerFired) -> None:
        state, name = self._state, fired.name
        if name == _TICK:
            self._tick(fired)
        elif name == DISPATCH_TIMER:
            dispatch_waiting(state)
        elif name == ACKNOWLEDGE_TIMER:
            send_acknowledgements(state)
        elif name == _PRESENCE:
            state.emit(self._presence(PresenceState.LEAVING if state.stopping else PresenceState.ALIVE))
            state.emit(StartTimer.again(fired, state.now_ns, PRESENCE_NS))
        elif name == _GRACE and state.connected:
            ask_after_outage(state)

    def _tick(self, fired: TimerFired) -> None:
        state = self._state
        self._ticks += 1
        if state.now_ns - self._tick_ns > TICK_NS:  # this process stood still; summaries that came meanwhile wait
            state.cluster.members.excuse(state.now_ns - self._tick_ns, state.now_ns)
        again = StartTimer.again(fired, state.now_ns, TICK_NS)
        self._tick_ns = again.at_ns
        state.emit(again)
        if state.now_ns >= state.deadline_ns:
            end_late_calls(state)
        if not state.connected:
            end_cut_off_calls(state)
        if state.detecting(state.now_ns):
            lose_silent(state, state.cluster.expire(state.now_ns))
            leave_hung_engines(state)
            if self._ticks % TICKS_PER_LOOK == 0:
                look_at_sequences(state)

    def _on_reconnected(self) -> None:
        state = self._state
        state.connected = True
        state.outage_end_ns = state.now_ns
        state.detectors_from_ns = state.now_ns + RECONNECT_GRACE_NS
        state.cluster.reset_liveness(state.detectors_from_ns)
        state.cascades.confirm_anew()
        for sequence in state.waiting.values():
            sequence.retry.since_ns = state.now_ns  # the time of the outage does not count
            sequence.retry.rounds = 0
        state.emit(StartTimer(name=_GRACE, at_ns=state.detectors_from_ns))
        dispatch_waiting(state, all_of_them=True)

    def _presence(self, presence: PresenceState) -> Publish:
        return self._heartbeat.presence(self._state.now_ns, presence, trouble="; ".join(self.unserved().values()))

    def unserved(self) -> dict[str, str]:
        """Models that are wanted and that no instance serves now, with what a client gets and why."""
        cluster, cascades = self._state.cluster, self._state.cascades
        return {
            model: f"{model} is answered with 503: {cluster.why_unserved(model)}"
            for model in self._state.models
            if not cluster.usable(model) and cascades.wants(model, seen=cluster.expects(model))
        }

    def _on_stop(self, body: StopRequested) -> None:
        state = self._state
        if not state.stopping:
            state.stopping = True
            state.emit(self._presence(PresenceState.LEAVING))
        if not body.replaced:  # else calls have their own deadlines
            state.stop_at_ns = min(state.stop_at_ns or sys.maxsize, state.now_ns + state.times.drain)
        if body.orphaned:
            state.stop_at_ns = state.now_ns
            self._stop_detail = "This server's supervisor has died, and this server ends with it."

    def _stop_when_idle(self) -> None:
        state = self._state
        if (state.calls or state.parents) and 0 < state.stop_at_ns <= state.now_ns:
            interrupt(state)
            for call in list(state.calls.values()):
                refuse_or_fail(state, call, RefusalKind.STOPPING, self._stop_detail)
            settle(state)
        if not state.calls and not state.parents:
            send_acknowledgements(state)
            if not self._stopped:
                state.emit(Stop(reason="stopped"))
                self._stopped = True

    # For people and checkers.

    def snapshot(self) -> dict[str, Any]:
        return inspection.snapshot(self._state)

    def check_invariants(self) -> None:
        inspection.check_invariants(self._state)

    def check_touched(self, body: Body) -> None:
        inspection.check_touched(self._state, body)
