"""The page's actor: hears what the cluster publishes and tells viewers what changed.

    message in                          → change                               → out
    DecisionMade                        → a row of ``q`` per sequence
    StatusSnapshot                      → its instance, states and lengths of its sequences
    LoadsReported                       → its instance
    MigrationFinished                   → the sequence's instance; an event
    RequestFinished                     → its rows end; one of ``f``; an event where it failed
    MoveBid                             → lines that flash once
    ServicePresence, KeyChanged, ...    → services, migrations under way, plans; an event where somebody is gone
    TimerFired(frame)                   → asks instances for snapshots          → ShowFrame, Subscribe

A snapshot is published with every step, which is more than anybody can see: the actor subscribes to one instance's,
takes one and unsubscribes, so many a frame. Nothing is published for the page, and nothing asks anybody. The server
reads whole frames and what is kept of a request from the actor.

A frame is JSON: ``{"t": unix ms, "d": changes, "b": bids}``; a whole one has ``"k": tables`` in place of ``d``. Tables:
``c`` the cluster, ``i`` instances, ``q`` sequences that are open, ``f`` requests that ended last, ``m`` migrations
under way, ``s`` services, ``p`` plans, ``e`` events. Times in rows are ms since the page's start, ``c.page.t0``.

Everything is bounded: rows of ``q`` by SEQUENCES_MAX, messages kept for ``/r/ID`` by REQUESTS_KEPT; beyond that
requests are not shown, and the oldest are forgotten.
"""

from __future__ import annotations

from typing import Any

import msgspec
from millrace.actor.effects import Effect, Log, StartTimer, Stop, Subscribe, Unsubscribe, WatchKeys
from millrace.contracts.broker import BoundaryMoved, LoadReported, LoadsReported, MoveBid
from millrace.contracts.local import BusDisconnected, BusReconnected, KeyChanged, StopRequested, TimerFired
from millrace.contracts.message import Message
from millrace.contracts.migration import MigrationFinished, MigrationOutcome
from millrace.contracts.observers import DecisionMade, ProvisioningDecided, RequestFinished
from millrace.contracts.plan import Plan
from millrace.contracts.sequences import request_id_of
from millrace.contracts.status import InstanceRecord, PresenceState, SequenceStatus, ServicePresence, StatusSnapshot
from millrace.contracts.subjects import Subjects

from services.page.config import PageConfig
from services.page.effects import OrderGiven, ShowFrame, ViewersCounted
from services.page.tables import Row, Tables

ACCEPTS = (
    BoundaryMoved,
    DecisionMade,
    LoadsReported,
    MigrationFinished,
    MoveBid,
    ProvisioningDecided,
    RequestFinished,
    ServicePresence,
    StatusSnapshot,
)

MS = 1_000_000
#: Time between frames while somebody looks on, and else: then they are kept for the slider only.
FRAME_NS, IDLE_FRAME_NS = 200 * MS, 1_000 * MS
#: Each instance is asked for a snapshot this often, and so many at most in one frame.
SAMPLE_NS, SAMPLES_MAX = 500 * MS, 40
#: An instance that has said nothing for so long is suspect, as ingress sees it; one that has gone is shown so long.
SUSPECT_NS, GONE_NS = 1_500 * MS, 30_000 * MS
#: A sequence that no snapshot shows for so long has ended, and its outcome was lost; one that has no instance may wait.
LOST_NS, WAITING_LOST_NS = 20_000 * MS, 600_000 * MS
#: A snapshot may be older than a placement that was heard before it.
SETTLE_NS = 600 * MS
SEQUENCES_MAX, EVENTS_MAX, FINISHED_MAX, BIDS_MAX = 20_000, 200, 60, 60
#: Requests whose messages are kept for ``/r/ID``, and messages of one of them.
REQUESTS_KEPT, MESSAGES_MAX = 4_000, 40
#: A viewer goes on counting a sequence's tokens by their rate; it is told anew where it would be off by such a share.
TOKENS_OFF_SHARE, TOKENS_OFF_MIN = 0.12, 24

_STATES = {"waiting": "w", "preempted": "x"}
_encode = msgspec.json.Encoder().encode


class _Sampled(msgspec.Struct):
    """The last snapshot of an instance, and when it came and was asked for."""

    last: StatusSnapshot | None = None
    heard_ns: int = 0
    asked_ns: int = 0


class PageActor:
    """Owns what viewers see."""

    def __init__(self, config: PageConfig, *, incarnation: int, kept_max: int = REQUESTS_KEPT) -> None:
        """``kept_max``: requests whose messages are kept."""
        self._kept_max = kept_max
        self.name = config.name
        self.incarnation = incarnation
        self.tables = Tables("c", "i", "q", "f", "m", "s", "p", "e")
        self._subjects = Subjects(config.bus.cluster)
        self._t0_ns = incarnation
        self._sampled: dict[str, _Sampled] = {}
        self._seen: dict[str, tuple[int, int]] = {}  # sequence: when a snapshot showed it, when it was placed
        self._bids: list[list[Any]] = []
        self._kept: dict[str, list[tuple[int, Any]]] = {}
        self._viewers = 0
        self._events = 0
        cluster, folder = config.bus.cluster, bool(config.folder)
        self.tables.put("c", "page", t0=incarnation // MS, cluster=cluster, folder=folder, connected=True)

    def start(self, now_ns: int) -> list[Effect]:
        subjects = self._subjects
        heard = [
            subjects.decisions(),
            subjects.outcomes(),
            subjects.migrations(),
            subjects.loads(),
            subjects.presences(),
            subjects.boundaries(),
            subjects.bid("*", "*"),
            f"{subjects.prefix}.provisioning.*",
        ]
        watched = [WatchKeys(bucket=name) for name in ("plan", "instance", "cascade")]
        return [*(Subscribe(subject=subject) for subject in heard), *watched, self._next_frame(now_ns)]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        match message.body:
            case StatusSnapshot() as body:
                return self._on_snapshot(body, now_ns)
            case DecisionMade() as body:
                self._on_decision(body, now_ns)
            case RequestFinished() as body:
                self._on_finished(body, now_ns)
            case MigrationFinished() as body:
                self._on_migration(body, now_ns)
            case LoadsReported(loads=loads):
                for load in loads:
                    self._on_load(load, now_ns)
            case MoveBid() as body if len(self._bids) < BIDS_MAX:
                self._bids.append([body.source, body.bidder, str(body.refusal or ""), body.sequence])
            case ServicePresence() as body:
                self._on_presence(body, now_ns)
            case BoundaryMoved() as body:
                cut = {"length": body.length, "why": body.why, "keeper": body.keeper, "epoch": body.plan_epoch}
                self.tables.put("p", f"{body.model}/{body.stage}", boundary=cut)
            case ProvisioningDecided() as body:
                whom = f"{body.action} {body.count}"
                self._event(now_ns, "scale", a=body.model, n=f"{whom} by {body.strategy}: {body.reason}")
            case KeyChanged() as body:
                self._on_key(body, now_ns)
            case TimerFired():
                return self._on_frame(now_ns)
            case ViewersCounted(count=count):
                self._viewers = count
                return [self._next_frame(now_ns)]
            case OrderGiven() as body:
                result = {None: "", 0: "done"}.get(body.code, f"failed ({body.code})")
                self._event(now_ns, "order", n=body.text, r=result)
                return [Log(level="info", event="order", fields={"order": body.text, "code": body.code})]
            case BusDisconnected() | BusReconnected() as body:
                self.tables.put("c", "page", connected=isinstance(body, BusReconnected))
            case StopRequested():
                return [Stop(reason="asked to stop")]
        return []

    # Frames

    def _next_frame(self, now_ns: int) -> Effect:
        return StartTimer(name="frame", at_ns=now_ns + (FRAME_NS if self._viewers else IDLE_FRAME_NS))

    def _on_frame(self, now_ns: int) -> list[Effect]:
        self._look_for_silence(now_ns)
        asks = self._ask_for_snapshots(now_ns)
        return [self.frame(now_ns), *asks, self._next_frame(now_ns)]

    def frame(self, now_ns: int) -> ShowFrame:
        """Changes since the last frame, as one."""
        frame, self._bids = {"t": now_ns // MS, "d": self.tables.take(), "b": self._bids}, []
        return ShowFrame(at_ms=now_ns // MS, data=_encode(frame))

    def whole(self, at_ms: int) -> bytes:
        """A frame with every row, JSON."""
        return _encode({"t": at_ms, "k": self.tables.rows})

    def _ask_for_snapshots(self, now_ns: int) -> list[Effect]:
        """One snapshot of each instance that has told none for long, oldest first. A subscription stays until it is
        answered.
        """
        due = [(s.asked_ns, name) for name, s in self._sampled.items() if now_ns - s.asked_ns >= SAMPLE_NS]
        asks: list[Effect] = []
        for _, name in sorted(due)[:SAMPLES_MAX]:
            self._sampled[name].asked_ns = now_ns
            asks.append(Subscribe(subject=self._subjects.status(self.tables.rows["i"][name]["model"], name)))
        return asks

    def _look_for_silence(self, now_ns: int) -> None:
        for name, sampled in list(self._sampled.items()):
            row, silent_ns = self.tables.rows["i"][name], now_ns - sampled.heard_ns
            if row["state"] == "ready" and sampled.heard_ns and silent_ns > max(SUSPECT_NS, 3 * SAMPLE_NS):
                self._change_state(name, "suspect", now_ns)
            elif row["state"] in ("dead", "suspect") and silent_ns > GONE_NS:
                self._sampled.pop(name)
                self.tables.drop("i", name)
        for name, (seen_ns, _) in list(self._seen.items()):
            if now_ns - seen_ns > (LOST_NS if self.tables.rows["q"][name]["inst"] else WAITING_LOST_NS):
                self._end(name)

    # Requests

    def _on_decision(self, body: DecisionMade, now_ns: int) -> None:
        self._keep(body.request, msgspec.structs.replace(body, block_hashes=b""), now_ns)
        forecast = next((f for f in body.forecasts if f.name == body.chosen and not f.note), None)
        for sequence in body.sequences:
            if sequence not in self._seen and len(self._seen) >= SEQUENCES_MAX:
                continue
            before = self.tables.rows["q"].get(sequence, {})
            self._seen[sequence] = (now_ns, now_ns)
            fields: Row = {"inst": body.chosen, "model": body.model, "st": "w", "prompt": body.prompt_tokens}
            fields |= {"max": body.max_tokens, "why": body.reason[:200]}
            if not before:
                fields |= {"at": self._ms(body.at_ns or now_ns), "moves": 0, "cont": 0, "o": [0, self._ms(now_ns), 0]}
            if body.expected_output_tokens is not None:
                fields["exp"] = round(body.expected_output_tokens)
            if forecast is not None and body.kind == "dispatch":
                fields |= {"ttft": forecast.ttft_ns // MS, "e2e": forecast.e2e_ns // MS}
            if body.kind == "continuation":
                fields["cont"] = before.get("cont", 0) + 1
                self._event(
                    now_ns, "failover", q=sequence, a=before.get("inst", ""), b=body.chosen, n=body.reason[:200]
                )
            self.tables.put("q", sequence, **fields)

    def _on_finished(self, body: RequestFinished, now_ns: int) -> None:
        self._keep(body.request, msgspec.structs.replace(body, block_hashes=b""), now_ns)
        for number in range(max(1, len(body.output_tokens))):
            self._end(f"{body.request}.{number}")
        where = body.instances[-1] if body.instances else ""
        if body.outcome not in ("completed", "cancelled"):
            self._event(now_ns, body.outcome, q=body.request, a=where, n=body.detail[:200])
        if where in self.tables.rows["i"] and body.prompt_tokens:
            known = self.tables.rows["i"][where].get("hit", 0.0)
            share = body.cached_tokens / body.prompt_tokens
            self.tables.put("i", where, hit=round(known + 0.1 * (share - known), 2))
        self.tables.put("f", body.request, **self._ended(body, now_ns))
        self.tables.trim("f", FINISHED_MAX)

    def _on_migration(self, body: MigrationFinished, now_ns: int) -> None:
        kept = msgspec.structs.replace(body, block_hashes=b"")
        self._keep(request_id_of(body.sequence), kept, now_ns)
        self.tables.drop("m", body.sequence)
        moved = body.outcome is MigrationOutcome.MOVED
        row = self.tables.rows["q"].get(body.sequence)
        if moved and row is not None:
            self._seen[body.sequence] = (now_ns, now_ns)
            self.tables.put("q", body.sequence, inst=body.target, moves=row.get("moves", 0) + 1, st="r")
        what = "move" if moved else "unmoved"
        note = body.note if moved else f"{body.refusal or body.outcome} {body.detail}"
        cost = {"ms": body.cost.frozen_ns // MS, "n": note[:200], "r": str(body.reason)}
        self._event(now_ns, what, q=body.sequence, a=body.source, b=body.target, **cost)

    def _on_snapshot(self, body: StatusSnapshot, now_ns: int) -> list[Effect]:
        name = body.instance
        sampled = self._instance(name, body.model)
        state = self.tables.rows["i"][name]["state"]
        heard: list[Effect] = [Unsubscribe(subject=self._subjects.status(body.model, name))]
        last, now = sampled.last, body.totals
        if state == "dead" and body.incarnation <= (last.incarnation if last else 0):
            return heard  # it was sent before its end
        sampled.heard_ns, sampled.last = now_ns, body
        fields: Row = {"running": len(body.running), "waiting": len(body.waiting), "preempted": body.preemptions}
        fields |= {"used": body.blocks_total - body.blocks_free, "total": body.blocks_total}
        if not body.running:
            fields |= {"step": 0, "tps": 0}
        elif last and now.steps >= last.totals.steps and body.at_ns > last.at_ns:
            busy_ms = (now.busy_ns - last.totals.busy_ns) / MS
            fields["step"] = round(busy_ms / max(1, now.steps - last.totals.steps), 1)
            fields["tps"] = round(max(0, now.decodes - last.totals.decodes) * 1e9 / (body.at_ns - last.at_ns))
        self.tables.put("i", name, **fields)
        if state in ("starting", "suspect", "dead"):
            self._change_state(name, "ready", now_ns)
        for status in (*body.running, *body.waiting):
            self._on_sequence(body, status, now_ns)
        return heard

    def _on_sequence(self, body: StatusSnapshot, status: SequenceStatus, now_ns: int) -> None:
        row = self.tables.rows["q"].get(status.sequence)
        placed_ns = self._seen.get(status.sequence, (0, 0))[1]
        if row is None and len(self._seen) >= SEQUENCES_MAX:
            return
        if row is not None and row["inst"] != body.instance and now_ns - placed_ns < SETTLE_NS:
            return  # it has just gone elsewhere
        self._seen[status.sequence] = (now_ns, placed_ns)
        state = _STATES.get(status.state) or ("r" if status.output_tokens else "p")
        fields: Row = {"inst": body.instance, "st": state}
        if row is None:
            fields |= {"model": body.model, "prompt": status.prompt_tokens, "max": status.max_tokens, "moves": 0}
            fields |= {"at": self._ms(status.arrival_ns or now_ns), "cont": 0, "o": [0, self._ms(now_ns), 0]}
            fields["exp"] = status.expected_output_tokens
        tokens, at_ms, rate = (row or fields)["o"]
        elapsed_s = max(0.001, (self._ms(now_ns) - at_ms) / 1e3)
        if abs(status.output_tokens - tokens - rate * elapsed_s) > max(TOKENS_OFF_MIN, TOKENS_OFF_SHARE * tokens):
            measured = round(max(0, status.output_tokens - tokens) / elapsed_s, 1) if tokens or row else 0
            fields["o"] = [status.output_tokens, self._ms(now_ns), measured]
        self.tables.put("q", status.sequence, **fields)

    def _end(self, sequence: str) -> None:
        self._seen.pop(sequence, None)
        self.tables.drop("q", sequence)
        self.tables.drop("m", sequence)

    def _keep(self, request: str, body: Any, now_ns: int) -> None:
        kept = self._kept.setdefault(request, [])
        if len(kept) < MESSAGES_MAX or isinstance(body, RequestFinished):
            kept.append((now_ns, body))
        while len(self._kept) > self._kept_max:
            del self._kept[next(iter(self._kept))]

    def told(self, request: str) -> list[tuple[int, Any]]:
        """Messages heard of a request or sequence, and of the attempts of a cascade's (``<request>~<number>``), each
        with its time, unix ns.
        """
        own = request if request in self._kept else request_id_of(request)
        heard = [kept for name, kept in self._kept.items() if name == own or name.startswith(f"{own}~")]
        return sorted((each for kept in heard for each in kept), key=lambda each: each[0])

    def ended(self) -> dict[str, Row]:
        """A row as in ``f`` of each request that ended, of those that are kept."""
        heard = (each for kept in self._kept.values() for each in kept)
        return {body.request: self._ended(body, at) for at, body in heard if isinstance(body, RequestFinished)}

    def _ended(self, body: RequestFinished, now_ns: int) -> Row:
        where = body.instances[-1] if body.instances else ""
        row: Row = {"t": self._ms(now_ns), "model": body.model, "what": body.outcome, "inst": where}
        row |= {"prompt": body.prompt_tokens, "out": sum(body.output_tokens), "e2e": body.e2e_ns // MS}
        row |= {"ttft": _whole_ms(body.ttft_ns), "said": _whole_ms(body.predicted_e2e_ns)}
        return row | {"moves": body.migrations, "cont": body.continuations}

    # Instances, services, plans

    def _instance(self, name: str, model: str) -> _Sampled:
        if name not in self._sampled:
            self._sampled[name] = _Sampled()
            empty = {"running": 0, "waiting": 0, "used": 0, "total": 0, "step": 0, "tps": 0}
            self.tables.put("i", name, model=model, state="starting", role="both", stage="", **empty)
            self._place(name, model)
        return self._sampled[name]

    def _on_load(self, body: LoadReported, now_ns: int) -> None:
        sampled = self._instance(body.instance, body.model)
        fields: Row = {"why": body.why[:200], "risk": round(body.memory_risk, 2)}
        if now_ns - sampled.heard_ns > 2 * SAMPLE_NS:  # more instances than can be sampled
            fields |= {"running": body.running, "waiting": body.waiting, "tps": round(body.tokens_per_s)}
            fields |= {"used": body.blocks_total - body.blocks_free, "total": body.blocks_total}
        self.tables.put("i", body.instance, **fields)
        state = self.tables.rows["i"][body.instance]["state"]
        if body.draining != (state == "draining") and state in ("ready", "draining"):
            self._change_state(body.instance, "draining" if body.draining else "ready", now_ns)

    def _on_presence(self, body: ServicePresence, now_ns: int) -> None:
        if body.role == "worker":
            if body.name in self._sampled and body.state is not PresenceState.ALIVE:
                self._change_state(body.name, "dead" if body.state is PresenceState.DEAD else "draining", now_ns)
            return
        key = f"{body.role}/{body.name}"
        row = self.tables.rows["s"].get(key)
        if row is not None and row["state"] != body.state and body.state is PresenceState.DEAD:
            self._event(now_ns, "dead", a=body.name, n=f"{body.role} ended")
        self.tables.put("s", key, state=str(body.state), trouble=body.trouble, url=body.url)
        if body.role == "supervisor":
            away = {each.instance: each.model for each in body.drained}
            back = [name for name, row in self.tables.rows["i"].items() if row["state"] == "drained"]
            for name, model in away.items():
                self._instance(name, model)
                self._change_state(name, "drained", now_ns)
            for name in set(back) - away.keys():
                self._change_state(name, "starting", now_ns)
        mine = {each.sequence for each in body.migrations}
        for sequence, row in list(self.tables.rows["m"].items()):
            if row["by"] == body.name and sequence not in mine:
                self.tables.drop("m", sequence)
        for each in body.migrations:
            fields = {"a": each.source, "b": each.target, "step": each.step, "bytes": each.bytes, "by": body.name}
            self.tables.put("m", each.sequence, **fields)

    def _change_state(self, name: str, state: str, now_ns: int) -> None:
        row = self.tables.rows["i"][name]
        before = row["state"]
        if before == state or (before == "drained" and state in ("dead", "draining", "suspect")):
            return
        if state in ("dead", "drained"):
            row = self.tables.put("i", name, running=0, waiting=0, used=0, step=0, tps=0)
        self.tables.put("i", name, state=state)
        if before != "starting" or state == "dead":
            self._event(now_ns, "dead" if state == "dead" else "state", a=name, r=state, n=f"was {before}")

    def _on_key(self, body: KeyChanged, now_ns: int) -> None:
        match body.value:
            case InstanceRecord() as record:
                self._instance(record.instance, record.model)
                fields: Row = {"total": record.blocks_total, "batch": record.max_sequences, "host": record.host}
                fields |= {"shape": record.shape, "engine": record.engine, "max": record.max_model_len}
                self.tables.put("i", record.instance, **fields)
            case Plan() as plan:
                if plan.model in self.tables.rows["p"]:
                    self._event(now_ns, "plan", a=plan.model, n=f"plan {plan.epoch}: {plan.reason}"[:240])
                self.tables.put("p", plan.model, **msgspec.to_builtins(plan))
                for stage in plan.stages:
                    for name in stage.instances:
                        self._place(name, plan.model)
            case None if body.bucket == "plan":
                self.tables.drop("p", body.key)
            case value if body.bucket == "cascade" and value is not None:
                self.tables.put("p", f"cascade {body.key}", **msgspec.to_builtins(value))

    def _place(self, name: str, model: str) -> None:
        """Stage and role of an instance, as the plan says."""
        plan = self.tables.rows["p"].get(model)
        for stage in plan["stages"] if plan and name in self.tables.rows["i"] else ():
            if name in stage["instances"]:
                self.tables.put("i", name, stage=stage["name"], role=stage["roles"].get(name, "both"))

    def _event(self, now_ns: int, kind: str, **fields: Any) -> None:
        self._events += 1
        self.tables.put("e", str(self._events), t=self._ms(now_ns), k=kind, **fields)
        self.tables.trim("e", EVENTS_MAX)

    def _ms(self, at_ns: int) -> int:
        return (at_ns - self._t0_ns) // MS

    def snapshot(self) -> dict[str, Any]:
        return {"name": self.name} | {table: len(rows) for table, rows in self.tables.rows.items()}

    def check_invariants(self) -> None:
        assert self._seen.keys() == self.tables.rows["q"].keys()
        assert self._sampled.keys() == self.tables.rows["i"].keys()
        assert len(self._kept) <= self._kept_max


def _whole_ms(ns: int | None) -> int | None:
    return None if ns is None else ns // MS
