"""The end of a worker: no new work, what can move moves, the rest finishes or is handed back; or its engine dies."""

from __future__ import annotations

from millrace.actor.effects import Effect, Log, Request, StartTimer, Stop
from millrace.contracts.ingress import ReturnReason
from millrace.contracts.local import Replied, RequestFailed
from millrace.contracts.migration import EvacuateInstance, InstanceEvacuated
from millrace.contracts.status import EngineDescription
from millrace.contracts.subjects import Subjects

from services.worker.config import MigrationConfig, WorkerLimits
from services.worker.context import WorkerContext

_MS = 1_000_000
#: Reason of the Stop effect after an orderly end.
DRAINED = "drained"
#: The broker says what it leaves so long before this worker hands that back, or after half of a short limit.
LEFT_MS = 250
#: The evacuation's answer may take so much longer than its limit.
EVACUATE_MARGIN_NS = 1_000 * _MS
DRAIN, LINGER, EVACUATE = "drain", "linger", "evacuate"


class Draining:
    """Owns how far the end has come.

    Attributes:
        stopped: The last effects have gone out.
    """

    def __init__(
        self,
        ctx: WorkerContext,
        info: EngineDescription,
        *,
        subjects: Subjects,
        limits: WorkerLimits,
        migration: MigrationConfig,
    ) -> None:
        self._ctx = ctx
        self._evacuates = info.kv is not None and migration.enabled
        self._subjects = subjects
        self._limits = limits
        self._until_ns: int | None = None
        self._lingering = False
        self._asked = False
        self.stopped = False

    @property
    def under_way(self) -> bool:
        """Whether no new work is taken any more."""
        return self._until_ns is not None

    def begin(self, now_ns: int, limit_ms: int, why: str) -> list[Effect]:
        """The earliest of several limits holds."""
        until_ns = now_ns + max(0, limit_ms) * _MS
        if self._until_ns is not None and self._until_ns <= until_ns:
            return []
        self._until_ns = until_ns
        ctx, reporter = self._ctx, self._ctx.reporter
        reporter.draining = True
        fields = {"why": why, "limit_ms": limit_ms, "live": ctx.ledger.live}
        effects: list[Effect] = [
            Log(level="info", event="draining", fields=fields),
            StartTimer(name=DRAIN, at_ns=until_ns),
        ]
        if reporter.bus_up:
            effects += [reporter.presence(now_ns), reporter.summary(now_ns, ctx.figures.output_tokens)]
            effects += self._evacuate(limit_ms)
        return effects

    def on_reconnected(self, now_ns: int) -> list[Effect]:
        """The bus is back: whoever was not asked to move things away is asked now, for the time that is left."""
        return self._evacuate((self._until_ns - now_ns) // _MS) if self._until_ns is not None else []

    def _evacuate(self, limit_ms: int) -> list[Effect]:
        """Asks its broker, once, to move everything to wherever there is room."""
        if not self._evacuates or self._asked or not self._ctx.ledger.live or limit_ms <= 0:
            return []
        self._asked = True
        return [
            Request(
                subject=self._subjects.migrate(self._ctx.identity.instance, "evacuate"),
                body=EvacuateInstance(limit_ms=max(limit_ms - LEFT_MS, limit_ms // 2)),
                correlation=EVACUATE,
                timeout_ns=limit_ms * _MS + EVACUATE_MARGIN_NS,
            )
        ]

    def evacuated(self, body: Replied | RequestFailed) -> list[Effect]:
        """Log the result of the evacuation. Sequences that are left finish here, or are handed back at the limit."""
        if body.correlation != EVACUATE:
            return []
        if isinstance(body, RequestFailed):
            return [Log(level="info", event="not_evacuated", fields={"why": str(body.reason)})]
        if not isinstance(body.body, InstanceEvacuated):
            return [Log(level="info", event="not_evacuated", fields={"why": type(body.body).__name__})]
        answer = body.body
        fields = {"moved": answer.moved, "failed": answer.failed, "left": answer.left}
        return [Log(level="info", event="evacuated", fields=fields)]

    def on_limit(self, now_ns: int) -> list[Effect]:
        """The drain timer: what still runs goes back to its ingresses."""
        if self._until_ns is None or now_ns < self._until_ns:
            return []
        live = [held for held in self._ctx.ledger if held.live]
        returned = self._ctx.hand_back(live, ReturnReason.DRAINING)
        return returned + self._ctx.remove(live, now_ns, "handed back: draining")

    def leave_if_done(self, now_ns: int) -> list[Effect]:
        """After each message while draining."""
        ledger = self._ctx.ledger
        if self._until_ns is None or ledger.live or self.stopped:
            return []
        if not len(ledger):
            return self.leave(now_ns, DRAINED)
        if self._lingering:
            return []
        # Finished ones may still be asked for again; a little while only.
        self._lingering = True
        return [StartTimer(name=LINGER, at_ns=now_ns + self._limits.linger_ms * _MS)]

    def engine_failed(self, detail: str, now_ns: int) -> list[Effect]:
        """Everything live is lost here."""
        ctx = self._ctx
        live = [held for held in ctx.ledger if held.live]
        line = Log(level="error", event="engine_failed", fields={"detail": detail, "lost": len(live)})
        ended = [span for held in live for span in ctx.spans(held, now_ns, "engine died")]
        returned = ctx.hand_back(live, ReturnReason.ENGINE_DIED)
        for held in live:
            ctx.reporter.gone(held)
            ctx.ledger.drop(held)
        return [line, *returned, *ended, *self.leave(now_ns, f"engine failed: {detail}")]

    def leave(self, now_ns: int, reason: str) -> list[Effect]:
        """The last words."""
        self.stopped = True
        reporter = self._ctx.reporter
        reporter.draining = True
        return [reporter.presence(now_ns), reporter.unregister(), Stop(reason=reason)]
