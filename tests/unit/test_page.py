"""The page's core: messages in, frames out; what viewers get; orders; the past."""

import json
import zlib
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest
from millrace.actor.config import BusConfig
from millrace.actor.effects import Effect, Subscribe, Unsubscribe
from millrace.actor.errors import ConfigError
from millrace.contracts.broker import LoadReported, LoadsReported, MoveBid
from millrace.contracts.local import KeyChanged, TimerFired
from millrace.contracts.message import Body, Message
from millrace.contracts.migration import MigrationFinished, MigrationOutcome
from millrace.contracts.observers import CandidateForecast, DecisionMade, RequestFinished
from millrace.contracts.plan import InstanceRole, Plan, Stage
from millrace.contracts.status import PresenceState, SequenceState, SequenceStatus, ServicePresence, StatusSnapshot
from millrace.http.exchange import DisconnectReason, Exchange, HttpRequest

from services.page.actor import EVENTS_MAX, FINISHED_MAX, LOST_NS, REQUESTS_KEPT, PageActor, ShowFrame
from services.page.config import PageConfig
from services.page.server import BEHIND_BYTES, PageServer
from services.page.tables import SEGMENT_MS, Past
from simulator.scenarios.shown_run import SimulationServer
from tests.testbed import messages
from tests.testbed.messages import plain, plain_record, plain_snapshot

SECOND = 1_000_000_000
BEGIN = 1_000 * SECOND


class World:
    """An actor, its clock, and a viewer that merges frames as a browser does. Instances w0 to w3 are registered."""

    def __init__(self) -> None:
        self.actor = PageActor(PageConfig(), incarnation=BEGIN)
        self.now_ns = BEGIN
        self.seen: dict[str, dict[str, Any]] = {}
        self.bids: list[Any] = []
        self.sent: list[Effect] = self.actor.start(BEGIN)
        for name in ("w0", "w1", "w2", "w3"):
            value = plain_record(name, engine="vllm")
            self.hear(KeyChanged(bucket="instance", key=name, value=value, revision=1))

    def hear(self, body: Body, later_ns: int = 0) -> list[Effect]:
        self.now_ns += later_ns
        effects = self.actor.handle(Message(body), self.now_ns)
        self.actor.check_invariants()
        for effect in effects:
            if isinstance(effect, ShowFrame):
                self._merge(json.loads(effect.data))
        self.sent += effects
        return effects

    def frame(self, later_ns: int = SECOND // 5) -> list[Effect]:
        return self.hear(TimerFired(name="frame"), later_ns)

    def _merge(self, frame: dict[str, Any]) -> None:
        self.bids += frame.get("b", [])
        for table, rows in frame["d"].items():
            for key, change in rows.items():
                if change is None:
                    self.seen.setdefault(table, {}).pop(key, None)
                else:
                    self.seen.setdefault(table, {}).setdefault(key, {}).update(change)

    def row(self, table: str, key: str) -> dict[str, Any]:
        self.frame()
        return self.seen[table][key]

    def events(self, kind: str) -> list[dict[str, Any]]:
        self.frame()
        return [event for event in self.seen.get("e", {}).values() if event["k"] == kind]


def decision(request: str, chosen: str, kind: str = "dispatch", **fields: Any) -> DecisionMade:
    forecasts = [CandidateForecast(chosen, ttft_ns=SECOND // 4, e2e_ns=2 * SECOND)]
    told = {"reason": "forecast to end first", "prompt_tokens": 100, "max_tokens": 500, "forecasts": forecasts}
    return messages.decision(request, chosen=chosen, kind=kind, **told, **fields)


def snapshot(instance: str, running: dict[str, int], **fields: Any) -> StatusSnapshot:
    """``running``: output tokens by sequence."""
    rows = [SequenceStatus(r, SequenceState.RUNNING, 100, 100, output, 500, 7, BEGIN) for r, output in running.items()]
    return plain_snapshot(instance, running=rows, **{"at_ns": BEGIN, "blocks_free": 90} | fields)


def finished(request: str, outcome: str = "completed") -> RequestFinished:
    return plain(RequestFinished, request=request, outcome=outcome, output_tokens=[5], detail="why")


def migrated(sequence: str, outcome: MigrationOutcome) -> MigrationFinished:
    return plain(MigrationFinished, sequence=sequence, source="w0", target="w1", outcome=outcome)


def presence(role: str, name: str, state: PresenceState = PresenceState.ALIVE, **fields: Any) -> ServicePresence:
    return ServicePresence(role=role, name=name, incarnation=1, at_ns=BEGIN, state=state, **fields)


@pytest.fixture
def world() -> World:
    return World()


def test_a_request_is_placed_decodes_moves_and_ends(world: World) -> None:
    world.hear(snapshot("w0", {}))
    world.hear(snapshot("w1", {}))
    world.hear(decision("r", "w0", expected_output_tokens=42.0))
    row = world.row("q", "r.0")
    assert (row["inst"], row["st"], row["prompt"], row["exp"], row["e2e"]) == ("w0", "w", 100, 42, 2000)
    world.hear(snapshot("w0", {"r.0": 60}), SECOND)
    assert world.row("q", "r.0")["st"] == "r"
    world.hear(migrated("r.0", MigrationOutcome.ABORTED))
    assert world.row("q", "r.0")["inst"] == "w0"
    world.hear(migrated("r.0", MigrationOutcome.MOVED))
    world.hear(snapshot("w0", {"r.0": 61}))  # it was sent before the move
    assert (world.row("q", "r.0")["inst"], world.row("q", "r.0")["moves"]) == ("w1", 1)
    moves = [(e["source"], e["target"], e["outcome"]) for e in world.events("MigrationFinished")]
    assert moves == [("w0", "w1", "aborted"), ("w0", "w1", "moved")]
    world.hear(finished("r"))
    world.frame()
    assert world.seen["q"] == {}
    assert world.seen["f"]["r"]["outcome"] == "completed"


def test_a_continuation_is_a_failover_and_a_failure_is_told(world: World) -> None:
    world.hear(snapshot("w0", {"r.0": 1}))
    for body in (decision("r", "w0"), presence("worker", "w0"), presence("worker", "w0", PresenceState.DEAD)):
        world.hear(body)
    world.hear(decision("r", "w1", "continuation"))
    assert [(e["source"], e["chosen"]) for e in world.events("DecisionMade")] == [("w0", "w1")]
    assert world.row("q", "r.0")["cont"] == 1
    world.hear(finished("r", "failed"))
    assert [(e["request"], e["detail"]) for e in world.events("RequestFinished")] == [("r", "why")]
    assert [e["state"] for e in world.events("ServicePresence")] == ["dead"]


def test_a_service_that_left_is_not_said_to_have_died(world: World) -> None:
    for state in (PresenceState.ALIVE, PresenceState.LEAVING, PresenceState.DEAD):
        world.hear(presence("worker", "w0", state))
    assert world.row("s", "worker/w0")["state"] == "leaving"


def test_a_snapshot_of_each_instance_is_wanted_in_every_second_frame_and_one_is_taken(world: World) -> None:
    asked = [[e.subject for e in world.frame() if isinstance(e, Subscribe)] for _ in range(4)]
    assert asked[:2] == asked[2:]
    assert sorted(asked[0] + asked[1]) == [f"mr.local.status.m.w{number}" for number in range(4)]
    heard = world.hear(snapshot("w0", {}))
    assert [e.subject for e in heard if isinstance(e, Unsubscribe)] == ["mr.local.status.m.w0"]


@pytest.mark.parametrize("killed", [False, True])
def test_an_instance_that_is_registered_no_more_is_gone_unless_it_comes_back(world: World, killed: bool) -> None:
    world.hear(snapshot("w0", {}))
    if killed:
        world.hear(presence("worker", "w0", PresenceState.DEAD))
    world.hear(KeyChanged(bucket="instance", key="w0", value=None, revision=2))
    world.hear(snapshot("w0", {}))  # it was on its way
    world.frame()
    assert ("w0" in world.seen["report"]) == killed


@pytest.mark.parametrize("last", ["w0", ""])
def test_a_request_whose_outcome_does_not_come_ends_wherever_it_was(world: World, last: str) -> None:
    world.hear(decision("r", last))
    world.frame(LOST_NS - SECOND)
    assert "r.0" in world.seen["q"]
    world.frame(2 * SECOND)
    assert world.seen["q"] == {}


def test_tokens_are_told_again_only_where_counting_on_by_their_rate_would_be_wrong(world: World) -> None:
    world.hear(snapshot("w0", {"r.0": 0}))
    for second in range(1, 11):
        world.hear(snapshot("w0", {"r.0": 100 * second}), SECOND)
        world.frame(0)
    told = [json.loads(e.data)["d"].get("q", {}) for e in world.sent if isinstance(e, ShowFrame)]
    updates = [rows["r.0"]["o"] for rows in told if "o" in rows.get("r.0", {})]
    assert len(updates) <= 3
    tokens, at_ms, rate = world.seen["q"]["r.0"]["o"]
    assert tokens + rate * (10_000 - at_ms) / 1000 == pytest.approx(1000, rel=0.15)


def test_plan_and_load_are_told_and_bids_flash_once(world: World) -> None:
    stage = Stage(name="s0", length_min=0, length_max=None, instances=["w0"], roles={"w0": InstanceRole.PREFILL})
    plan = Plan(model="m", epoch=3, stages=[stage], coordinator="c", reason="as asked")
    world.hear(snapshot("w0", {}))
    world.hear(KeyChanged(bucket="plan", key="m", value=plan, revision=1))
    load = plain(LoadReported, instance="w1", incarnation=1, at_ns=BEGIN, why="balance: nothing offered")
    world.hear(LoadsReported(loads=[load]), 2 * SECOND)
    assert world.row("plan", "m")["stages"][0]["roles"] == {"w0": "prefill"}
    assert world.row("report", "w1")["why"] == "balance: nothing offered"
    world.hear(MoveBid(ask="a", sequence="r.0", source="w0", bidder="w1", plan_epoch=0))
    world.frame()
    world.frame()
    assert world.bids == [["w0", "w1", "", "r.0"]]


def test_random_messages_leave_every_viewer_with_the_same_tables_and_everything_bounded() -> None:
    """``World`` compares the merged tables with the whole ones; invariants are checked after each message."""
    rng = Random(5)
    world = World()
    world.seen = json.loads(world.actor.whole())["k"]
    say: list[Callable[[], Body]] = [
        lambda: decision(f"r{rng.randrange(400)}", f"w{rng.randrange(4)}", rng.choice(["dispatch", "continuation"])),
        lambda: finished(f"r{rng.randrange(400)}", rng.choice(["completed", "failed", "cancelled"])),
        lambda: migrated(f"r{rng.randrange(400)}.0", rng.choice(list(MigrationOutcome))),
        lambda: snapshot(f"w{rng.randrange(4)}", {f"r{rng.randrange(400)}.0": rng.randrange(300)}, incarnation=2),
        lambda: presence(rng.choice(["worker", "migrator"]), f"w{rng.randrange(4)}", rng.choice(list(PresenceState))),
        lambda: TimerFired(name="frame"),
    ]
    for _ in range(3000):
        world.hear(rng.choice(say)(), rng.randrange(SECOND // 10))
    world.frame()
    assert world.seen == json.loads(world.actor.whole())["k"]
    assert len(world.seen["e"]) <= EVENTS_MAX
    assert len(world.seen["f"]) <= FINISHED_MAX


def test_what_was_heard_of_a_request_is_told_and_the_oldest_are_forgotten(world: World) -> None:
    for number in range(REQUESTS_KEPT + 1):
        world.hear(decision(f"r{number}", "w0"))
        world.hear(finished(f"r{number}"))

    def told(request: str) -> list[str]:
        return [msgspec.json.decode(msgspec.json.encode(body))["type"] for _, body in world.actor.told(request)]

    assert told("r0") == []
    assert told(f"r{REQUESTS_KEPT}.0") == ["DecisionMade/1", "RequestFinished/1"]


@pytest.mark.parametrize("asked", ["r", "r~1", "r~2.0"])
def test_attempts_of_a_cascade_are_told_with_its_request_in_the_order_of_their_times(world: World, asked: str) -> None:
    for body in (decision("r~1", "w0"), finished("r~1"), decision("r~2", "w1"), finished("r~2"), finished("r")):
        world.hear(body, SECOND)
    heard = [(at_ns, json.loads(bytes(body))["request"]) for at_ns, body in world.actor.told(asked)]
    assert heard == [(BEGIN + n * SECOND, name) for n, name in enumerate(["r~1", "r~1", "r~2", "r~2", "r"], 1)]


def test_the_past_is_kept_in_segments_within_its_bound() -> None:
    run, rng = Past(bytes_max=2000), Random(1)
    for number in range(100):
        text = b"%x" % rng.getrandbits(400)
        run.keep(number * SEGMENT_MS // 2, text, lambda text=text: text)
    spans = run.spans()
    assert 2 < len(spans) < 20
    assert spans[-1][1] == 99 * SEGMENT_MS // 2
    first = run.segment(spans[0][0])
    assert len(zlib.decompress(first).splitlines()) == 2
    assert run.segment(1) is None


class Wire:
    """The part of a connection that an Exchange needs, and what it wrote; ``behind``: bytes that wait for a reader."""

    def __init__(self) -> None:
        self.transport = self
        self.text = b""
        self.behind = 0

    def write(self, data: bytes) -> None:
        self.text += data

    def get_write_buffer_size(self) -> int:
        return self.behind

    def date_header(self) -> bytes:
        return b""

    def check_buffer(self) -> None:
        pass

    def finished(self, exchange: Any) -> None:
        pass


def asked(server: PageServer, path: str, host: str = "127.0.0.1:8001", body: str = "{}", **headers: str) -> Wire:
    wire = Wire()
    sent = {b"host": host.encode()} | {name.encode(): value.encode() for name, value in headers.items()}
    method = "POST" if path == "/order" else "GET"
    request = HttpRequest(method=method, path=path, headers=sent, body=body.encode(), keep_alive=True, chunked=False)
    server.handle(Exchange(request, wire))  # type: ignore[arg-type]
    return wire


def server_of(config: PageConfig | None = None) -> PageServer:
    world = World()
    config = config or PageConfig()

    def deliver(body: Body) -> None:
        for effect in world.hear(body):
            if isinstance(effect, ShowFrame):
                server.show(effect)

    server = PageServer(config, [world.actor])
    server.tick = lambda: deliver(TimerFired(name="frame"))  # type: ignore[attr-defined]
    return server


def frames(wire: Wire) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in wire.text.splitlines() if line.startswith(b"data: ")]


def test_a_slow_viewer_gets_fewer_frames_then_a_whole_one_and_others_get_all() -> None:
    server = server_of()
    quick, slow = asked(server, "/stream"), asked(server, "/stream")
    for number in range(6):
        slow.behind = BEHIND_BYTES + 1 if 1 <= number < 4 else 0
        server.tick()  # type: ignore[attr-defined]
    assert ["k" in frame for frame in frames(quick)] == [True] + [False] * 6
    assert ["k" in frame for frame in frames(slow)] == [True, False, True, False]
    for viewer in list(server.viewers):
        viewer.gone(DisconnectReason.CLIENT_GONE)
    assert not server.viewers


@pytest.mark.parametrize(
    ("config", "host", "key", "status"),
    [
        ({}, "localhost:8001", "", 200),
        ({}, "page.example:8001", "", 401),  # a name of somebody else's that leads here
        ({"host": "0.0.0.0"}, "localhost:8001", "", 401),
        ({"host": "0.0.0.0"}, "10.0.0.1:8001", "Bearer secret", 200),
        ({"host": "0.0.0.0"}, "10.0.0.1:8001", "Bearer another", 401),
    ],
)
def test_who_may_look(config: dict[str, Any], host: str, key: str, status: int) -> None:
    server = server_of(PageConfig(bus=BusConfig(password="secret"), **config))
    answer = asked(server, "/run/0/history", host, authorization=key).text
    assert answer.startswith(b"HTTP/1.1 %d" % status)
    assert b"content-security-policy: default-src 'self'" in answer
    assert asked(server, "/", host).text.startswith(b"HTTP/1.1 200")
    with pytest.raises(ConfigError, match="no passwords"):
        PageServer(PageConfig(host="0.0.0.0"), [])


@pytest.mark.parametrize(
    ("order", "status"),
    [
        ("migrate r.0 --to w1", 401),
        ("scale m -1", 401),
        ("apply - --dry-run", 401),
        ("", 400),
        ("up", 400),
        ("drain --force", 400),
        ("drain w0 --nats", 400),
        ("migrate r --to --nats", 400),
        ("role w0 both --limit", 400),
        ("apply /etc/passwd", 400),
        ("cluster add w0", 400),
    ],
)
def test_an_order_is_a_verb_of_the_command_line_and_needs_a_key(order: str, status: int) -> None:
    key = "" if status == 401 else "Bearer x"
    sent = asked(server_of(), "/order", body=json.dumps({"order": order}), authorization=key)
    assert sent.text.startswith(b"HTTP/1.1 %d" % status)


def test_a_simulation_carries_out_what_the_page_itself_asks_for() -> None:
    done: list[str] = []
    server = SimulationServer(PageConfig(), [], done.append)
    for host, key in (("127.0.0.1:8001", "Bearer any"), ("127.0.0.1:8001", ""), ("page.example:8001", "Bearer any")):
        asked(server, "/order", host, '{"order": "kill w0"}', authorization=key)
    assert done == ["kill w0"]
