"""State of one ingress: open calls, their sequences with token logs, and open questions to other services."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.actor.deps import ActorDeps
from millrace.actor.effects import Effect, Publish
from millrace.contracts.subjects import Subjects
from millrace.contracts.worker import CancelSequence

from services.ingress.answer_health import AnswerHealth, PredictorsHealth
from services.ingress.calls.limits import AdmissionLimits
from services.ingress.calls.listener import Listener
from services.ingress.calls.open_call import OpenCall
from services.ingress.cascade.entry import LearntEntry
from services.ingress.cascade.open_cascade import OpenCascade
from services.ingress.cascade.plans import CascadePlans
from services.ingress.cluster.cluster_view import IngressClusterView
from services.ingress.config import IngressConfig, dispatch_policy
from services.ingress.dispatch.prefix_blocks import PrefixHolders, PromptBlocks
from services.ingress.lifecycle import SequenceEvent
from services.ingress.metrics import IngressMetrics
from services.ingress.pending import Pending
from services.ingress.sequence import OpenSequence
from services.ingress.times import Times
from services.ingress.tokens.detokenizer import TextModel

#: Advances a sequence by an event and carries out the reaction (``transitions.react``).
React = Callable[["IngressState", OpenSequence, SequenceEvent], None]


@dataclass(frozen=True, kw_only=True)
class IngressDeps(ActorDeps):
    """Dependencies of an ingress beside its configuration.

    Attributes:
        models: Vocabulary of each model that it serves, by the model's name.
        entries: Fitted choice of tiers by prompt, by the cascade's name.
    """

    models: Mapping[str, TextModel]
    entries: Mapping[str, LearntEntry] = field(default_factory=dict)


class IngressState:
    """Everything one ingress knows, changed by the handlers of actor.py and the modules it calls.

    Attributes:
        now_ns: Time of the message being handled.
        emit: Adds an effect to those of that message, which are kept in the order in which handling caused them. No
            other object of the core holds effects (docs/decisions/0094-one-outbox-in-ingress.md).
        deadline_ns: No open call's deadline is earlier.
        owned: Instance -> its submitted and running sequences.
        granted: Target -> sequences with an open epoch grant there.
        waiting: Sequences to be dispatched again after a pause.
        acknowledge: Instance -> ended sequences with their epochs, for the next acknowledgement.
        on_trial: The latest sequence that was dispatched alone, after two engines died with it.
        trials_due_ns: Model -> time until which suspects of it want an instance for themselves.
        stale_until_ns: (sequence, instance) -> time until which no further cancel is sent.
        detectors_from_ns: Silence means nothing before.
        judges: Fitted confidence judge of a model's answers, where it has one.
        entries: Fitted choice of tiers by prompt, of cascades that have one.
        parents: Open calls of cascades; their attempts are in ``calls``.
        unsettled: Those whose attempts had events in the message being handled.
    """

    def __init__(self, config: IngressConfig, deps: IngressDeps) -> None:
        """Raises ConfigError where the dispatch policy or its parameters are wrong."""
        self.config = config
        self.name = config.name
        self.now_ns = 0
        self._effects: list[Effect] = []
        self.emit: Callable[[Effect], None] = self._effects.append
        self.client = Listener(self.emit)
        self.incarnation = deps.incarnation
        self.models = models = deps.models
        self.metrics = IngressMetrics(deps.registry)
        self.rng = deps.rng
        self._react: React | None = None
        self.subjects = Subjects(config.bus.cluster)
        self.times = Times(config)
        self.cluster = IngressClusterView(self.times.hang, config.membership)
        self.admission = AdmissionLimits(config.limits)
        self.calls: dict[str, OpenCall] = {}
        self.judges = {name: model.judge for name, model in models.items() if model.judge is not None}
        self.cascades = CascadePlans(config.cascades, models)
        self.entries = dict(deps.entries)
        self.parents: dict[str, OpenCascade] = {}
        self.unsettled: dict[str, OpenCascade] = {}
        self.deadline_ns = 0
        self.sequences: dict[str, OpenSequence] = {}
        self.owned: dict[str, dict[str, OpenSequence]] = {}
        self.granted: dict[str, dict[str, OpenSequence]] = {}
        self.waiting: dict[str, OpenSequence] = {}
        self.metrics.now = lambda: (self.admission.calls_open, self.admission.sequences_open, len(self.waiting))
        self.on_trial: OpenSequence | None = None
        self.trials_due_ns: dict[str, int] = {}
        self.pending: dict[str, Pending] = {}
        self.correlations = 0
        self.acknowledge: dict[str, list[tuple[str, int]]] = {}
        self.stale_until_ns: dict[tuple[str, str], int] = {}
        self.parameters: Any  # as the policy's own struct
        self.policy, self.parameters = dispatch_policy(config.dispatch)
        self.policy_states: dict[tuple[str, str], Any] = {}
        self.policy_faults: set[str] = set()  # places that were logged
        self.connected = True
        self.lost_ns = 0  # when the bus went away, while it is
        self.detectors_from_ns = 0
        self.outage_end_ns = 0
        self.tagger = AnswerHealth()
        self.predictors: defaultdict[str, PredictorsHealth] = defaultdict(PredictorsHealth)  # by model
        self.holders = PrefixHolders()
        self.stopping = False
        self.stop_at_ns = 0  # when calls are given up; 0 for never
        self.dispatch_timer_ns = 0

    def bind(self, react: React) -> None:
        """Set what ``fire`` calls: transitions stand above this module and cannot be imported here."""
        self._react = react

    def fire(self, sequence: OpenSequence, event: SequenceEvent) -> None:
        """Advance a sequence by an event, with all that follows.

        Raises:
            TransitionRefused: the event cannot happen in its state.
        """
        assert self._react is not None
        self._react(self, sequence, event)

    def take_effects(self) -> list[Effect]:
        taken = self._effects.copy()
        self._effects.clear()
        return taken

    def cancel(self, sequence: str, epoch: int, instance: str, reason: str, request: str = "") -> None:
        """Tell an instance to drop a sequence, up to an epoch."""
        body = CancelSequence(sequence=sequence, epoch=epoch, reason=reason)
        self.emit(Publish(subject=self.subjects.engine(instance, "cancel"), body=body, request=request))

    def correlation(self, kind: str, pending: Pending) -> str:
        """A fresh correlation under which ``pending`` is found again."""
        self.correlations += 1
        name = f"{kind}.{self.correlations}"
        self.pending[name] = pending
        return name

    def detecting(self, now_ns: int) -> bool:
        """Whether silence means anything now: not while the bus is away, nor shortly after."""
        return self.connected and now_ns >= self.detectors_from_ns

    def cut_off(self, now_ns: int, after_ns: int) -> str:
        """The text for clients once the bus has been away for so long; empty before."""
        away_ns = now_ns - self.lost_ns
        if self.connected or away_ns < after_ns:
            return ""
        return f"This server has had no connection to NATS for {away_ns / 1e9:.0f} s."

    def prompt_blocks(self, sequence: OpenSequence) -> PromptBlocks:
        """Hashes of a sequence's prompt blocks, computed once."""
        if sequence.blocks is None:
            size = self.cluster.cached_block_size(sequence.call.call.model)
            sequence.blocks = PromptBlocks(sequence.prompt, size, sequence.sampling.prefix_salt)
        return sequence.blocks
