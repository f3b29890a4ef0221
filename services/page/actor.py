"""The page's actor: hears what the cluster publishes and tells viewers what changed.

A frame is JSON: ``{"t": unix ms, "d": changes, "b": bids}``; a whole one has ``"k": tables`` in place of ``d``. Rows:

    table                    of                            from
    c                        the page itself
    i                        each instance                 StatusSnapshot, LoadsReported, RequestFinished (prefix hits)
    q                        each open sequence            DecisionMade, StatusSnapshot, MigrationFinished
    f, e                     ended requests, events        messages as they are, with ``t``, and ``k``, their type
    s, boundary              services, boundaries          ServicePresence, BoundaryMoved, as they are
    plan, instance, cascade  keys of these buckets         their values as they are

What else viewers see (states, stages, migrations under way) follows from these in ``static/state.js``. Times that the
actor adds are ms since its start, ``c.page.t0``.

A snapshot is published with every step, which is more than anybody can see: the actor subscribes to one instance's,
takes one and unsubscribes. Nothing is published for the page, and nothing asks anybody. Everything is bounded: beyond
SEQUENCES_MAX requests are not shown, and of what has ended the oldest are forgotten.
"""

from __future__ import annotations

from typing import Any

import msgspec
from millrace.actor.effects import Effect, Log, StartTimer, Stop, Subscribe, Unsubscribe, WatchKeys
from millrace.contracts.broker import BoundaryMoved, LoadReported, LoadsReported, MoveBid
from millrace.contracts.local import BusDisconnected, BusReconnected, KeyChanged, StopRequested, TimerFired
from millrace.contracts.message import Body, Message
from millrace.contracts.migration import MigrationFinished, MigrationOutcome
from millrace.contracts.observers import DecisionMade, ProvisioningDecided, RequestFinished
from millrace.contracts.sequences import request_id_of
from millrace.contracts.status import InstanceRecord, PresenceState, SequenceStatus, ServicePresence, StatusSnapshot
from millrace.contracts.subjects import Subjects

from services.page.config import PageConfig
from services.page.effects import OrderGiven, ShowFrame
from services.page.tables import Row, Tables

_FOR_FRAMES = (BoundaryMoved, DecisionMade, LoadsReported, MigrationFinished, MoveBid, ProvisioningDecided)
ACCEPTS = (*_FOR_FRAMES, RequestFinished, ServicePresence, StatusSnapshot)
BUCKETS = ("plan", "instance", "cascade")

MS = 1_000_000
#: Time between frames, whether somebody looks on or not: they are kept for the slider.
FRAME_NS = 250 * MS
#: Each instance is asked for a snapshot this often, and so many at most in one frame.
SAMPLE_NS, SAMPLES_MAX = 500 * MS, 40
#: One that leaves a snapshot unanswered for so long is silent, as ingress sees it; one that says nothing is gone then.
SILENT_NS, GONE_NS = 1_500 * MS, 30_000 * MS
#: A sequence that no snapshot shows for so long has ended, and its outcome was lost; one that has no instance may wait.
LOST_NS, WAITING_LOST_NS = 20_000 * MS, 600_000 * MS
#: A snapshot may be older than a placement that was heard before it.
SETTLE_NS = 600 * MS
SEQUENCES_MAX, EVENTS_MAX, FINISHED_MAX, BIDS_MAX = 20_000, 200, 30, 60
#: Requests whose messages are kept for ``/r/ID``, and messages of one of them.
REQUESTS_KEPT, MESSAGES_MAX = 4_000, 40
#: A viewer goes on counting a sequence's tokens by their rate; it is told anew where it would be off by such a share.
TOKENS_OFF_SHARE, TOKENS_OFF_MIN = 0.12, 24
#: Fields that no row has: long ones, names of keys, and what no view shows.
_LEFT_OUT = {"adapters", "block_hashes", "forecasts", "kv", "scores", "attempts", "moving", "key"}
_LEFT_OUT |= {"arrival_ns", "at_ns", "award", "block_size", "finish_reasons", "ingress", "migration", "mode", "parent"}
_LEFT_OUT |= {"placed_ns", "predicted_cached_tokens", "predicted_output_tokens", "predicted_ttft_ns"}
_EMPTY = {"running": 0, "waiting": 0, "used": 0, "step": 0, "tps": 0}
_STATES = {"waiting": "w", "preempted": "x"}
_encode = msgspec.json.Encoder(enc_hook=str).encode


class _Sampled(msgspec.Struct):
    """The last snapshot of an instance and when it came, its last sign of life, and since when a next one is asked for
    (0 where none is).
    """

    last: StatusSnapshot | None = None
    heard_ns: int = 0
    taken_ns: int = 0
    asked_ns: int = 0


class PageActor:
    """Owns what viewers see."""

    def __init__(self, config: PageConfig, *, incarnation: int, kept_max: int = REQUESTS_KEPT) -> None:
        """``kept_max``: requests whose messages are kept."""
        self._kept_max = kept_max
        self.name = config.name
        self.incarnation = incarnation
        self.tables = Tables("c", "i", "q", "f", "e", "s", "boundary", *BUCKETS)
        self._subjects = Subjects(config.bus.cluster)
        self._sampled: dict[str, _Sampled] = {}
        self._seen: dict[str, tuple[int, int]] = {}  # sequence: when a snapshot showed it, when it was placed
        self._bids: list[list[Any]] = []
        self._kept: dict[str, list[tuple[int, Any]]] = {}
        self._events = 0
        cluster, folder = config.bus.cluster, bool(config.folder)
        self.tables.put("c", "page", t0=incarnation // MS, cluster=cluster, folder=folder, connected=True)

    def start(self, now_ns: int) -> list[Effect]:
        on = self._subjects
        heard = [on.decisions(), on.outcomes(), on.migrations(), on.loads(), on.presences(), on.boundaries()]
        heard += [on.bid("*", "*"), f"{on.prefix}.provisioning.*"]
        watched = [WatchKeys(bucket=name) for name in BUCKETS]
        return [*(Subscribe(subject=subject) for subject in heard), *watched, _next_frame(now_ns)]

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
                for load in (each for each in loads if not self._has_ended(each.instance, each.incarnation)):
                    self._on_load(load, now_ns)
            case MoveBid() as body if len(self._bids) < BIDS_MAX:
                self._bids.append([body.source, body.bidder, str(body.refusal or ""), body.sequence])
            case ServicePresence() as body:
                self._on_presence(body, now_ns)
            case BoundaryMoved() as body:
                self.tables.put("boundary", f"{body.model}/{body.stage}", **_row(body))
            case KeyChanged() as body:
                self._on_key(body, now_ns)
            case TimerFired():
                return self._on_frame(now_ns)
            case ProvisioningDecided() as body:
                self._event(body, now_ns)
            case OrderGiven() as body:
                self._event(body, now_ns)
                return [Log(level="info", event="order", fields={"order": body.text, "code": body.code})]
            case BusDisconnected() | BusReconnected() as body:
                self.tables.put("c", "page", connected=isinstance(body, BusReconnected))
            case StopRequested():
                return [Stop(reason="asked to stop")]
        return []

    # Frames

    def _on_frame(self, now_ns: int) -> list[Effect]:
        for name, sampled in list(self._sampled.items()):
            silent_ns = now_ns - max(sampled.heard_ns, sampled.asked_ns)
            self.tables.put("i", name, silent=sampled.asked_ns > 0 and silent_ns > SILENT_NS)
            if now_ns - sampled.heard_ns > GONE_NS:
                self._sampled.pop(name)
                self.tables.drop("i", name)
        for name, (seen_ns, _) in list(self._seen.items()):
            if now_ns - seen_ns > (LOST_NS if self.tables.rows["q"][name]["inst"] else WAITING_LOST_NS):
                self._end(name)
        return [self.frame(now_ns), *self._ask_for_snapshots(now_ns), _next_frame(now_ns)]

    def frame(self, now_ns: int) -> ShowFrame:
        """Changes since the last frame, as one."""
        frame, self._bids = {"t": now_ns // MS, "d": self.tables.take(), "b": self._bids}, []
        return ShowFrame(at_ms=now_ns // MS, data=_encode(frame))

    def whole(self, at_ms: int) -> bytes:
        """A frame with every row, JSON."""
        return _encode({"t": at_ms, "k": self.tables.rows})

    def _ask_for_snapshots(self, now_ns: int) -> list[Effect]:
        """One of each instance that has told none for long, oldest first. A subscription stays until it is answered."""
        idle = ((each.taken_ns, name) for name, each in self._sampled.items() if not each.asked_ns)
        asks: list[Effect] = []
        for _, name in sorted(each for each in idle if now_ns - each[0] >= SAMPLE_NS)[:SAMPLES_MAX]:
            self._sampled[name].asked_ns = now_ns
            asks.append(Subscribe(subject=self._subjects.status(self.tables.rows["i"][name]["model"], name)))
        return asks

    # Requests

    def _on_decision(self, body: DecisionMade, now_ns: int) -> None:
        self._keep(body.request, body, now_ns)
        forecast = next((f for f in body.forecasts if f.name == body.chosen and not f.note), None)
        fields: Row = {"inst": body.chosen, "model": body.model, "st": "w", "why": body.reason[:200]}
        fields["exp"] = body.expected_output_tokens
        if forecast is not None and body.kind == "dispatch":
            fields |= {"ttft": forecast.ttft_ns // MS, "e2e": forecast.e2e_ns // MS}
        for sequence in body.sequences:
            row = self._opened(sequence, body, body.at_ns or now_ns, now_ns)
            if row is None:
                continue
            if body.kind == "continuation":
                self._event(body, now_ns, sequence=sequence, source=row.get("inst", ""))
                fields["cont"] = row["cont"] + 1
            self._seen[sequence] = (now_ns, now_ns)
            self.tables.put("q", sequence, **fields)

    def _opened(self, sequence: str, of: DecisionMade | SequenceStatus, at_ns: int, now_ns: int) -> Row | None:
        """Its row, which is made where there is none; None where there is no room for one more."""
        row = self.tables.rows["q"].get(sequence)
        if row is None and len(self._seen) < SEQUENCES_MAX:
            row = {"inst": "", "prompt": of.prompt_tokens, "max": of.max_tokens, "at": self._ms(at_ns)}
            row = self.tables.put("q", sequence, **row, moves=0, cont=0, o=[0, self._ms(now_ns), 0])
        return row

    def _on_finished(self, body: RequestFinished, now_ns: int) -> None:
        self._keep(body.request, body, now_ns)
        for number in range(max(1, len(body.output_tokens))):
            self._end(f"{body.request}.{number}")
        if body.outcome not in ("completed", "cancelled"):
            self._event(body, now_ns)
        known = self.tables.rows["i"].get(body.instances[-1]) if body.instances else None
        if known is not None and body.prompt_tokens:
            hit = known.get("hit", 0.0)
            hit += 0.1 * (body.cached_tokens / body.prompt_tokens - hit)
            self.tables.put("i", body.instances[-1], hit=round(hit, 2))
        self.tables.drop("f", body.request)
        self.tables.put("f", body.request, t=self._ms(now_ns), **_row(body))
        self.tables.trim("f", FINISHED_MAX)

    def _on_migration(self, body: MigrationFinished, now_ns: int) -> None:
        self._keep(request_id_of(body.sequence), body, now_ns)
        self._event(body, now_ns)
        row = self.tables.rows["q"].get(body.sequence)
        if body.outcome is MigrationOutcome.MOVED and row is not None:
            self._seen[body.sequence] = (now_ns, now_ns)
            self.tables.put("q", body.sequence, inst=body.target, moves=row["moves"] + 1, st="r")

    def _on_sequence(self, body: StatusSnapshot, status: SequenceStatus, now_ns: int) -> None:
        row = self._opened(status.sequence, status, status.arrival_ns or now_ns, now_ns)
        placed_ns = self._seen.get(status.sequence, (0, 0))[1]
        if row is None or (row["inst"] not in ("", body.instance) and now_ns - placed_ns < SETTLE_NS):
            return  # there is no room, or it has just gone elsewhere
        self._seen[status.sequence] = (now_ns, placed_ns)
        state = _STATES.get(status.state) or ("r" if status.output_tokens else "p")
        fields: Row = {"inst": body.instance, "model": body.model, "st": state}
        tokens, at_ms, rate = row["o"]
        elapsed_s = max(0.001, (self._ms(now_ns) - at_ms) / 1e3)
        if abs(status.output_tokens - tokens - rate * elapsed_s) > max(TOKENS_OFF_MIN, TOKENS_OFF_SHARE * tokens):
            measured = round(max(0, status.output_tokens - tokens) / elapsed_s, 1)
            fields["o"] = [status.output_tokens, self._ms(now_ns), measured]
        self.tables.put("q", status.sequence, **fields)

    def _end(self, sequence: str) -> None:
        self._seen.pop(sequence, None)
        self.tables.drop("q", sequence)

    def _keep(self, request: str, body: Any, now_ns: int) -> None:
        kept = self._kept.setdefault(request, [])
        if len(kept) < MESSAGES_MAX or isinstance(body, RequestFinished):
            body = msgspec.structs.replace(body, block_hashes=b"")
            kept.append((now_ns, body if isinstance(body, RequestFinished) else msgspec.Raw(_encode(body))))
        while len(self._kept) > self._kept_max:
            del self._kept[next(iter(self._kept))]

    def told(self, request: str) -> list[tuple[int, Any]]:
        """Messages heard of a request or sequence, and of the attempts of a cascade's (``<request>~<number>``), each
        with its time, unix ns. JSON but for RequestFinished: as objects they took six times the memory.
        """
        own = request if request in self._kept else request_id_of(request)
        heard = [kept for name, kept in self._kept.items() if name == own or name.startswith(f"{own}~")]
        return sorted((each for kept in heard for each in kept), key=lambda each: each[0])

    def ended(self) -> dict[str, Row]:
        """A row as in ``f`` of each request that ended, of those that are kept."""
        heard = (each for kept in self._kept.values() for each in kept)
        ends = [(at, body) for at, body in heard if isinstance(body, RequestFinished)]
        return {body.request: {"t": self._ms(at)} | _row(body) for at, body in ends}

    # Instances, services, plans

    def _instance(self, name: str, model: str, now_ns: int) -> _Sampled:
        """An instance that gives a sign of life; one that was not known gets its row."""
        if name not in self._sampled:
            self._sampled[name] = _Sampled()
            self.tables.put("i", name, model=model, total=0, **_EMPTY)
        self._sampled[name].heard_ns = now_ns
        return self._sampled[name]

    def _on_snapshot(self, body: StatusSnapshot, now_ns: int) -> list[Effect]:
        heard: list[Effect] = [Unsubscribe(subject=self._subjects.status(body.model, body.instance))]
        if self._has_ended(body.instance, body.incarnation):
            return heard
        sampled = self._instance(body.instance, body.model, now_ns)
        last, sampled.last, sampled.taken_ns, sampled.asked_ns = sampled.last, body, now_ns, 0
        fields: Row = {"running": len(body.running), "waiting": len(body.waiting), "preempted": body.preemptions}
        fields |= {"used": body.blocks_total - body.blocks_free, "total": body.blocks_total, "inc": body.incarnation}
        if not body.running:
            fields |= {"step": 0, "tps": 0}
        elif last and body.totals.steps >= last.totals.steps and body.at_ns > last.at_ns:
            was, now = last.totals, body.totals
            fields["step"] = round((now.busy_ns - was.busy_ns) / MS / max(1, now.steps - was.steps), 1)
            fields["tps"] = round(max(0, now.decodes - was.decodes) * 1e9 / (body.at_ns - last.at_ns))
        self.tables.put("i", body.instance, **fields)
        for status in (*body.running, *body.waiting):
            self._on_sequence(body, status, now_ns)
        return heard

    def _has_ended(self, name: str, incarnation: int) -> bool:
        """Whether this is of a process that has ended: it was on its way then, or its broker goes on."""
        said = self.tables.rows["s"].get(f"worker/{name}", {})
        return said.get("state") == PresenceState.DEAD and incarnation <= said["incarnation"]

    def _on_load(self, body: LoadReported, now_ns: int) -> None:
        sampled = self._instance(body.instance, body.model, now_ns)
        fields: Row = {"why": body.why[:200], "risk": round(body.memory_risk, 2), "draining": body.draining}
        fields["inc"] = body.incarnation
        if now_ns - sampled.taken_ns > 2 * SAMPLE_NS:  # more instances than can be sampled
            fields |= {"running": body.running, "waiting": body.waiting, "tps": round(body.tokens_per_s)}
            fields |= {"used": body.blocks_total - body.blocks_free, "total": body.blocks_total}
        self.tables.put("i", body.instance, **fields)

    def _on_presence(self, body: ServicePresence, now_ns: int) -> None:
        key, through = f"{body.role}/{body.name}", body.incarnation or body.at_ns
        row = self.tables.rows["s"].get(key, {})
        if body.state is PresenceState.DEAD:
            if row.get("state") == PresenceState.LEAVING:
                return  # it left, as it had said
            if body.name in self._sampled:
                self.tables.put("i", body.name, **_EMPTY)
        if (row.get("state", PresenceState.ALIVE), row.get("incarnation", through)) != (body.state, through):
            self._event(body, now_ns)
        self.tables.put("s", key, **(_row(body) | {"incarnation": through}))
        for each in body.drained:
            self._instance(each.instance, each.model, now_ns)

    def _on_key(self, body: KeyChanged, now_ns: int) -> None:
        if body.value is None:
            self.tables.drop(body.bucket, body.key)
            return
        if isinstance(body.value, InstanceRecord):
            self._instance(body.value.instance, body.value.model, now_ns)
            self.tables.put("i", body.value.instance, total=body.value.blocks_total)
        elif body.bucket == "plan" and body.key in self.tables.rows["plan"]:
            self._event(body.value, now_ns)
        self.tables.put(body.bucket, body.key, **_row(body.value))

    def _event(self, body: Body, now_ns: int, **more: Any) -> None:
        self._events += 1
        self.tables.put("e", str(self._events), t=self._ms(now_ns), k=type(body).__name__, **_row(body), **more)
        self.tables.trim("e", EVENTS_MAX)

    def _ms(self, at_ns: int) -> int:
        return (at_ns - self.incarnation) // MS

    def snapshot(self) -> dict[str, Any]:
        return {"name": self.name} | {table: len(rows) for table, rows in self.tables.rows.items()}

    def check_invariants(self) -> None:
        assert self._seen.keys() == self.tables.rows["q"].keys()
        assert self._sampled.keys() == self.tables.rows["i"].keys()
        assert len(self._kept) <= self._kept_max


def _next_frame(now_ns: int) -> Effect:
    return StartTimer(name="frame", at_ns=now_ns + FRAME_NS)


def _row(body: Body) -> Row:
    """A message as a row."""
    return {name: getattr(body, name) for name in body.__struct_fields__ if name not in _LEFT_OUT}
