"""The page's actor: hears what the cluster publishes and tells viewers what changed.

A frame is JSON: ``{"t": unix ms, "d": changes, "b": bids}``; a whole one has ``"k": tables`` in place of ``d``. Rows:

    table                    of                            from
    c                        the page itself
    report                   each instance                 StatusSnapshot, LoadsReported
    q                        each open sequence            DecisionMade, StatusSnapshot, MigrationFinished
    f, e                     ended requests, events        messages as they are, with ``t``, and ``k``, their type
    s, boundary              services, boundaries          ServicePresence, BoundaryMoved, as they are
    plan, instance, cascade  keys of these buckets         their values as they are

What else viewers see (states, stages, migrations under way) follows from these in ``static/state.js``. Times that the
actor adds are ms since its start, ``c.page.t0``.

A snapshot is published with every step, which is more than anybody can see: the actor subscribes to one instance's,
takes one and unsubscribes. Everything is bounded, and of what has ended the oldest is forgotten.
"""

from __future__ import annotations

from typing import Any

import msgspec
from millrace.actor.effects import Effect, Log, StartTimer, Stop, Subscribe, Unsubscribe, WatchKeys
from millrace.contracts.broker import BoundaryMoved, LoadsReported, MoveBid
from millrace.contracts.local import BusDisconnected, BusReconnected, KeyChanged, StopRequested, TimerFired
from millrace.contracts.message import Body, Message
from millrace.contracts.migration import MigrationFinished, MigrationOutcome
from millrace.contracts.observers import DecisionMade, ProvisioningDecided, RequestFinished
from millrace.contracts.sequences import request_id_of
from millrace.contracts.status import PresenceState, SequenceStatus, ServicePresence, StatusSnapshot
from millrace.contracts.subjects import Subjects

from services.page.config import PageConfig
from services.page.tables import Past, Row, Tables

_FOR_FRAMES = (BoundaryMoved, DecisionMade, LoadsReported, MigrationFinished, MoveBid, ProvisioningDecided)
ACCEPTS = (*_FOR_FRAMES, RequestFinished, ServicePresence, StatusSnapshot)
BUCKETS = ("plan", "instance", "cascade")

MS = 1_000_000
#: Time between frames, whether somebody looks on or not: they are kept for the slider.
FRAME_NS = 250 * MS
#: In every second frame a snapshot of each instance is wanted, of so many at most in one: the others have a later turn.
SAMPLES_MAX = 40
#: A sequence that nothing tells of for so long has ended: it was refused in the end, or its outcome was lost.
LOST_NS = 30_000 * MS
#: A snapshot may be older than a placement that was heard before it.
SETTLE_NS = 600 * MS
SEQUENCES_MAX, SERVICES_MAX, EVENTS_MAX, FINISHED_MAX, BIDS_MAX = 20_000, 5_000, 200, 60, 60
#: Requests whose messages are kept for ``/r/ID``, and messages of one of them.
REQUESTS_KEPT, MESSAGES_MAX = 4_000, 40
#: A viewer goes on counting a sequence's tokens by their rate; it is told anew where it would be off by such a share.
TOKENS_OFF_SHARE, TOKENS_OFF_MIN = 0.12, 24
#: Fields that no row has: long ones, names of keys, and what no view shows.
_LEFT_OUT = {"adapters", "block_hashes", "forecasts", "kv", "scores", "attempts", "moving", "key"}
_LEFT_OUT |= {"arrival_ns", "at_ns", "award", "block_size", "finish_reasons", "ingress", "migration", "mode", "parent"}
_LEFT_OUT |= {"placed_ns", "predicted_cached_tokens", "predicted_output_tokens", "predicted_ttft_ns"}
_STATES = {"waiting": "w", "preempted": "x"}
_encode = msgspec.json.Encoder(enc_hook=str).encode


class ShowFrame(Effect, frozen=True, kw_only=True):
    """A frame for viewers. ``data``: JSON."""

    data: bytes


class OrderGiven(Body, frozen=True, kw_only=True, tag="local.OrderGiven/1"):
    """An operator gave an order through the page. ``code``: exit code of its verb; None while it runs."""

    text: str
    code: int | None = None


class PageActor:
    """Owns what viewers see.

    Attributes:
        at_ms: Time of the last frame, unix ms.
        past: Frames until then.
    """

    def __init__(self, config: PageConfig, *, incarnation: int, kept_max: int = REQUESTS_KEPT) -> None:
        """``kept_max``: requests whose messages are kept."""
        self._kept_max = kept_max
        self.name = config.name
        self.incarnation = incarnation
        self.at_ms = incarnation // MS
        self.past = Past()
        self.tables = Tables("c", "report", "q", "boundary", *BUCKETS, f=FINISHED_MAX, e=EVENTS_MAX, s=SERVICES_MAX)
        self._subjects = Subjects(config.bus.cluster)
        self._turn = 0
        self._seen: dict[str, tuple[int, int]] = {}  # sequence: when a snapshot showed it, when it was placed
        self._bids: list[list[Any]] = []
        self._kept: dict[str, list[tuple[int, bytes]]] = {}
        self._events = 0
        self.tables.put("c", "page", t0=self.at_ms, cluster=config.bus.cluster, folder=bool(config.folder))

    def start(self, now_ns: int) -> list[Effect]:
        on = self._subjects
        heard = [on.decisions(), on.outcomes(), on.migrations(), on.loads(), on.presences(), on.boundaries()]
        heard += [on.bid("*", "*"), f"{on.prefix}.provisioning.*"]
        watched = [WatchKeys(bucket=name) for name in BUCKETS]
        return [*(Subscribe(subject=subject) for subject in heard), *watched, StartTimer(name="frame", at_ns=now_ns)]

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
                    risk = round(load.memory_risk, 2)
                    self._report(load.instance, why=load.why[:200], risk=risk, draining=load.draining)
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
            case ProvisioningDecided() | OrderGiven() as body:
                self._event(body, now_ns)
                if isinstance(body, OrderGiven):
                    return [Log(level="info", event="order", fields={"order": body.text, "code": body.code})]
            case BusDisconnected() | BusReconnected() as body:
                self.tables.put("c", "page", connected=isinstance(body, BusReconnected))
            case StopRequested():
                return [Stop(reason="asked to stop")]
        return []

    def _on_frame(self, now_ns: int) -> list[Effect]:
        for name, (seen_ns, _) in list(self._seen.items()):
            if now_ns - seen_ns > LOST_NS or len(self._seen) > SEQUENCES_MAX:
                self._end(name)
        known = list(self.tables.rows["instance"].items())
        turns = max(2, -(-len(known) // SAMPLES_MAX))
        self._turn = (self._turn + 1) % turns
        due = [Subscribe(subject=self._subjects.status(row["model"], name)) for name, row in known[self._turn :: turns]]
        return [self.frame(now_ns), *due, StartTimer(name="frame", at_ns=now_ns + FRAME_NS)]

    def frame(self, now_ns: int) -> ShowFrame:
        """Changes since the last frame, as one."""
        self.at_ms = now_ns // MS
        data = _encode({"t": self.at_ms, "d": self.tables.take(), "b": self._bids})
        self._bids = []
        self.past.keep(self.at_ms, data, self.whole)
        return ShowFrame(data=data)

    def whole(self) -> bytes:
        """A frame with every row, as of the last one."""
        return _encode({"t": self.at_ms, "k": self.tables.rows})

    def _on_decision(self, body: DecisionMade, now_ns: int) -> None:
        self._keep(body.request, body, now_ns)
        fields: Row = {"inst": body.chosen, "model": body.model, "st": "w", "why": body.reason[:200]}
        fields["exp"] = body.expected_output_tokens
        if body.kind == "dispatch":
            known = (each.e2e_ns // MS for each in body.forecasts if each.name == body.chosen and not each.note)
            fields["e2e"] = next(known, None)
        for sequence in body.sequences:
            row = self._opened(sequence, body, body.at_ns or now_ns, now_ns)
            if body.kind == "continuation":
                self._event(body, now_ns, sequence=sequence, source=row.get("inst", ""))
                fields["cont"] = row["cont"] + 1
            self._seen[sequence] = (now_ns, now_ns)
            self.tables.put("q", sequence, **fields)

    def _opened(self, sequence: str, of: DecisionMade | SequenceStatus, at_ns: int, now_ns: int) -> Row:
        """Its row, which is made where there is none."""
        known = self.tables.rows["q"].get(sequence)
        row = {"inst": "", "at": self._ms(at_ns), "moves": 0, "cont": 0, "o": [0, self._ms(now_ns), 0]}
        return known or self.tables.put("q", sequence, prompt=of.prompt_tokens, max=of.max_tokens, **row)

    def _on_finished(self, body: RequestFinished, now_ns: int) -> None:
        self._keep(body.request, body, now_ns)
        for number in range(max(1, len(body.output_tokens))):
            self._end(f"{body.request}.{number}")
        if body.outcome not in ("completed", "cancelled"):
            self._event(body, now_ns)
        self.tables.drop("f", body.request)
        self.tables.put("f", body.request, t=self._ms(now_ns), **_row(body))

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
        if row["inst"] not in ("", body.instance) and now_ns - placed_ns < SETTLE_NS:
            return  # it has just gone elsewhere
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

    def _keep(self, request: str, body: DecisionMade | MigrationFinished | RequestFinished, now_ns: int) -> None:
        kept = self._kept.setdefault(request.partition("~")[0], [])
        kept.append((now_ns, _encode(msgspec.structs.replace(body, block_hashes=b""))))
        del kept[MESSAGES_MAX:-1]
        if len(self._kept) > self._kept_max:
            del self._kept[next(iter(self._kept))]

    def told(self, request: str) -> list[tuple[int, msgspec.Raw]]:
        """Messages (JSON, each with its unix ns) of a request or sequence; of a cascade's attempt, of all of them."""
        kept = self._kept.get(request_id_of(request).partition("~")[0], ())
        return [(at_ns, msgspec.Raw(data)) for at_ns, data in kept]

    def _on_snapshot(self, body: StatusSnapshot, now_ns: int) -> list[Effect]:
        fields: Row = {"running": len(body.running), "waiting": len(body.waiting), "preempted": body.preemptions}
        fields |= {"used": body.blocks_total - body.blocks_free, "total": body.blocks_total, "inc": body.incarnation}
        sums = [self._ms(now_ns), body.totals.busy_ns // MS, body.totals.steps, body.totals.decodes]
        self._report(body.instance, model=body.model, sums=sums, **fields)
        for status in (*body.running, *body.waiting):
            self._on_sequence(body, status, now_ns)
        return [Unsubscribe(subject=self._subjects.status(body.model, body.instance))]

    def _report(self, instance: str, **fields: Any) -> None:
        if instance in self.tables.rows["instance"]:
            self.tables.put("report", instance, **fields)

    def _on_presence(self, body: ServicePresence, now_ns: int) -> None:
        key, through = f"{body.role}/{body.name}", body.incarnation or body.at_ns
        row = self.tables.rows["s"].get(key, {"state": PresenceState.ALIVE, "incarnation": through})
        if (row["state"], body.state) == (PresenceState.LEAVING, PresenceState.DEAD):
            return  # it left, as it had said
        if (row["state"], row["incarnation"]) != (body.state, through):
            self._event(body, now_ns)
        self.tables.put("s", key, **(_row(body) | {"incarnation": through}))

    def _on_key(self, body: KeyChanged, now_ns: int) -> None:
        known = self.tables.rows[body.bucket].get(body.key)
        if body.value is not None:
            self.tables.put(body.bucket, body.key, **_row(body.value))
            if known and body.bucket == "plan":
                self._event(body.value, now_ns)
            return
        self.tables.drop(body.bucket, body.key)
        worker = self.tables.rows["s"].get(f"worker/{body.key}", {"state": "", "incarnation": 0})
        dead = worker["state"] == PresenceState.DEAD
        if known and body.bucket == "instance" and not dead and worker["incarnation"] <= known["incarnation"]:
            self.tables.drop("report", body.key)  # else it is shown as dead or starting until it is back

    def _event(self, body: Body, now_ns: int, **more: Any) -> None:
        self._events += 1
        self.tables.put("e", str(self._events), t=self._ms(now_ns), k=type(body).__name__, **_row(body), **more)

    def _ms(self, at_ns: int) -> int:
        return (at_ns - self.incarnation) // MS

    def snapshot(self) -> dict[str, Any]:
        return {"name": self.name} | {table: len(rows) for table, rows in self.tables.rows.items()}

    def check_invariants(self) -> None:
        assert self._seen.keys() == self.tables.rows["q"].keys()
        assert len(self._kept) <= self._kept_max


def _row(body: Body) -> Row:
    """A message as a row."""
    return {name: getattr(body, name) for name in body.__struct_fields__ if name not in _LEFT_OUT}
