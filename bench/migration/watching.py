"""Puts together what engines, bus and client noted of one migration: the points that it passes, and how far apart."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from millrace.contracts.codec import MalformedMessage, decode
from millrace.contracts.ingress import TokensGenerated
from nats.aio.msg import Msg

from tests.testbed.migration_operator import Operator
from tests.testbed.timed_streams import TimedStream

#: Environment variable of the engines: where their lines go.
FOLDER = "MILLRACE_WATCH_FOLDER"
#: By how much the client may see an event before whoever watches the bus has been told, ns.
AHEAD_NS = 2_000_000
#: Points of a migration in their order, each with what lies between it and the one before.
POINTS = (
    ("A's last step ends", ""),
    ("its token passes the bus", "engine process and worker of A"),
    ("the client has it", "ingress, client"),
    ("FreezeSequence is asked", "negative: before the token before"),
    ("A's engine stops it", "A's worker, the step under way"),
    ("SubmitSequence", "answer, source's migrator"),
    ("B's engine begins to take it", "B's worker, the step under way"),
    ("it has taken it", "the last blocks are read"),
    ("its first step there begins", "until it is scheduled"),
    ("that step ends", "B's first step"),
    ("B's token passes the bus", "engine process and worker of B"),
    ("the client has that", "ingress, client"),
)


@dataclass(slots=True)
class Heard:
    """Times of what passed the bus, monotonic ns: messages by migration, tokens by sequence."""

    asked: dict[str, dict[str, int]] = field(default_factory=dict)
    tokens: dict[str, list[tuple[int, str]]] = field(default_factory=dict)

    async def listen(self, operator: Operator) -> None:
        """Subscribes on the operator's connection."""
        prefix = operator.subjects.prefix
        for channel in ("engine.*.*", "migrate.*.*", "moved.*"):
            await operator.subscribe(f"{prefix}.{channel}", self._handshake)
        await operator.subscribe(f"{prefix}.tokens.*", self._tokens)

    async def _handshake(self, message: Msg) -> None:
        at, body = time.monotonic_ns(), _body(message)
        handover = getattr(body, "handover", None)
        migration = handover.migration if handover is not None else getattr(body, "migration", "")
        if migration:
            self.asked.setdefault(migration, {}).setdefault(type(body).__name__, at)

    async def _tokens(self, message: Msg) -> None:
        at, body = time.monotonic_ns(), _body(message)
        if isinstance(body, TokensGenerated):
            for chunk in body.chunks:
                self.tokens.setdefault(chunk.sequence, []).append((at, body.instance))


def _body(message: Msg) -> Any:
    try:
        return decode(message.data)
    except MalformedMessage:
        return None


Line = dict[str, Any]


class Watch(msgspec.Struct, frozen=True):
    """One migration. Times in ms.

    Attributes:
        points: Monotonic ns of each of POINTS; None where it was not seen.
        gap: Between the last event of the source's tokens and the first of the target's.
        widest: The widest interval of the whole stream, and how many events after the gap that lies.
        slowest: The longest step of either engine during that interval: ms, and how many tokens it computed.
        pause: The longest interval between the stream's messages on the bus during that one.
        usual: The stream's median interval.
        ways: Medians at the source: from a step's end to the bus, from there to the client.
        steps: The target's steps with it: (whole, scheduling, computing, of which this thread computed, page faults,
            times that the process was displaced).
        first: Sequences, tokens and waiting sequences of the first of them.
        silent: Messages with tokens less events of the client.
        without: Steps of the target that began after it had been taken and did not have it.
    """

    points: list[int | None]
    gap: float
    widest: tuple[float, int]
    slowest: tuple[float, int]
    pause: float
    usual: float
    ways: tuple[float, float]
    steps: list[tuple[float, ...]]
    first: tuple[int, int, int]
    silent: int
    without: int

    def stages(self) -> list[float | None]:
        """Milliseconds between neighbouring points."""
        return [None if a is None or b is None else (b - a) / 1e6 for a, b in pairwise(self.points)]


def noted(folder: Path) -> list[list[Line]]:
    """Return the lines that each engine noted."""
    return [
        [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        for path in sorted(folder.glob("engine-*.jsonl"))
    ]


def read(stream: TimedStream, heard: Heard, migration: str, target: str, engines: list[list[Line]]) -> Watch:
    """One migration's points."""
    name, times = stream.sequence, [int(at * 1e9) for at in stream.times]
    source, taker = _sides(engines, migration)
    told = heard.tokens[name]
    first_told = next(index for index, (_, instance) in enumerate(told) if instance == target)
    last_a, first_b = (_event_of(told[index][0], times) for index in (first_told - 1, first_told))
    asked = heard.asked.get(migration, {})
    froze = _one(source, "move", migration=migration, command="FreezeInEngine")
    took = _one(taker, "add", sequence=name)
    steps_a, steps_b = _steps(source, name), _steps(taker, name)
    points = [
        steps_a[-1]["ended"],
        told[first_told - 1][0],
        times[last_a],
        asked.get("FreezeSequence"),
        froze["ended"] if froze else None,
        asked.get("SubmitSequence"),
        took["began"] if took else None,
        took["ended"] if took else None,
        steps_b[0]["began"],
        steps_b[0]["ended"],
        told[first_told][0],
        times[first_b],
    ]
    intervals = [(later - earlier) / 1e6 for earlier, later in pairwise(times)]
    widest = max(range(len(intervals)), key=intervals.__getitem__)
    begins = took["ended"] if took else steps_b[0]["began"]
    return Watch(
        points=points,
        gap=(times[first_b] - times[last_a]) / 1e6,
        widest=(intervals[widest], widest - last_a),
        slowest=_slowest(engines, times[widest], times[widest + 1]),
        pause=_pause([at for at, _ in told], times[widest], times[widest + 1]),
        usual=statistics.median(intervals),
        ways=_ways(steps_a, [at for at, _ in told[:first_told]], times),
        silent=len(told) - len(times),
        steps=_split(taker, name),
        first=(len(steps_b[0]["sequences"]), steps_b[0]["tokens"], steps_b[0]["waiting"]),
        without=sum(line["kind"] == "step" and begins < line["began"] < steps_b[0]["began"] for line in taker),
    )


def _slowest(engines: list[list[Line]], since: int, until: int) -> tuple[float, int]:
    steps = [line for lines in engines for line in lines if line["kind"] == "step"]
    during = [
        ((s["ended"] - s["began"]) / 1e6, s["tokens"]) for s in steps if since < s["ended"] and s["began"] < until
    ]
    return max(during, default=(0.0, 0))


def _pause(told: list[int], since: int, until: int) -> float:
    """The longest interval between messages on the bus that the window meets, ms."""
    return max(((b - a) / 1e6 for a, b in pairwise(told) if since < b and a < until), default=0.0)


def _sides(engines: list[list[Line]], migration: str) -> tuple[list[Line], list[Line]]:
    """Lines of the source, lines of the target."""
    source = next(lines for lines in engines if _one(lines, "move", migration=migration, command="FreezeInEngine"))
    return source, next(lines for lines in engines if lines is not source)


def _one(lines: list[Line], kind: str, **fields: str) -> Line | None:
    """The first line of this kind with these fields."""
    wanted = fields.items()
    return next((line for line in lines if line["kind"] == kind and wanted <= line.items()), None)


def _steps(lines: list[Line], name: str) -> list[Line]:
    return [line for line in lines if line["kind"] == "step" and name in line["sequences"]]


def _event_of(told: int, times: list[int]) -> int:
    """Index of the client's event that brought what passed the bus then: a token that ends within a character brings
    none, so that events cannot be counted. The client may have been quicker than whoever watched the bus.
    """
    later = [index for index, at in enumerate(times) if at > told - AHEAD_NS]
    return later[0] if later else len(times) - 1


def _ways(steps: list[Line], told: list[int], times: list[int]) -> tuple[float, float]:
    """Return the median transit times, ms, of the source's tokens: to the bus, and from there to the client."""
    out = [(at - step["ended"]) / 1e6 for step, at in zip(steps[-len(told) :], told, strict=False)]
    on = [(times[_event_of(at, times)] - at) / 1e6 for at in told]
    return statistics.median(out), statistics.median(on)


def _split(lines: list[Line], name: str) -> list[tuple[float, ...]]:
    """The steps with this sequence in their parts; counts are differences to the step before, whosever that was."""
    found: list[tuple[float, ...]] = []
    last: Line | None = None
    for line in lines:
        if line["kind"] != "step":
            continue
        if name in line["sequences"]:
            faults, displaced = (line[key] - last[key] if last else 0 for key in ("faults", "displaced"))
            began, scheduled, computed = line["began"], line["scheduled"], line["computed"]
            parts = (line["ended"] - began, scheduled - began, computed - scheduled, line["cpu"])
            found.append((*(part / 1e6 for part in parts), faults, displaced))
        last = line
    return found
