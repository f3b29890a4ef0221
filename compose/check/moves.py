"""Running requests are moved between containers: by an operator, and by the stop of a worker."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path

from millrace.cli.trace_reading import attribute, request_of, spans_of
from millrace.cli.trace_tree import build, draw
from millrace.telemetry.spans import SpanLine

from compose.check.calls import Failed, call, say, wait
from compose.check.deployment import Deployment, is_healthy
from compose.check.metrics import Prometheus, counter_of
from compose.check.operator import Operator
from compose.check.streams import FRESH_PROMPTS, MANY_TOKENS, Api, Streams

CONTINUATIONS = "millrace_ingress_continuations_total"
#: An instance that gets no processor for seconds is given up by ingress; that is not for a move to prevent.
SILENCES = 'millrace_ingress_continuations_total{reason="instance_silent"}'
MOVED = 'millrace_ingress_migrations_total{outcome="moved"}'
#: What containers that share a volume of sockets can use. They have no process ids in common.
COPIER = "shared_memory"
NOWHERE = "worker-9"
#: What is said to others in a migration that succeeds; answers go to the asker alone, and are not heard.
CONVERSATION = (
    "MigrateSequence",
    "AskForMove",
    "MoveBid",
    "LeaseKv",
    "AllotEpoch",
    "PrepareMigration",
    "FreezeSequence",
    "SequenceMoved",
    "EndLease",
    "MigrationFinished",
)
#: So many of them come before the migration has a name.
ASKED = 3
#: Whole runs of the check have shown some 100 lines of a tree; this many are enough to see one.
TREE_LINES = 24


class Moves:
    """Moves requests of one deployment and compares what clients see with an undisturbed run.

    Args:
        deployment: A running one with two workers.
        api: Its API.
        operator: Who asks.
        prometheus: That scrapes it.
        work: A folder for what was heard.
    """

    def __init__(
        self, deployment: Deployment, api: Api, *, operator: Operator, prometheus: Prometheus, work: Path
    ) -> None:
        self._deployment = deployment
        self._api = api
        self._operator = operator
        self._prometheus = prometheus
        self._work = work
        self._undisturbed: list[str] = []

    def there_and_back(self, *, traces: bool) -> None:
        """An operator moves two running requests to the other worker and back; tap and trace tell of it.

        The undisturbed run comes after it: before, the other worker would have had the blocks in its cache.
        """
        before, heard = self._counts(), self._work / "tap.txt"
        with self._operator.listening(heard):
            streams = self._speaking()
            requests = streams.requests[:2]
            told = [line for _ in range(2) for line in self._operator.move(requests)]
            refused = self._operator.refused(requests[0], to=NOWHERE)
            texts = streams.texts()
            wait(
                "tap to hear of every move", 30, lambda: len(of_type("MigrationFinished", lines_of(heard))) >= len(told)
            )
        if wrong := [line for line in told if f" by {COPIER}," not in line]:
            raise Failed(f"not moved by {COPIER}: {wrong[0]}")
        if idle := [line for line in told[: len(requests)] if " in 0 pieces" in line]:
            raise Failed(f"nothing was copied, and no cache can have had it: {idle[0]}")
        self._none_continued(before, moved_min=len(told))
        self._undisturbed = self._speaking().texts()
        self._compare(texts, "two of them moved")
        for line in told:
            say(f"migrate: {line}")
        say(f"migrate: {refused}")
        say(f"{len(told)} moves between two containers, texts identical, longest pause {streams.gap_s:.3f} s")
        show_conversation(lines_of(heard), request_of(requests[0]))
        if traces:
            self._one_tree(requests[0])
        self._no_block_left()

    def drained_and_stopped(self) -> None:
        """Every request leaves one worker by `millrace drain`, then the other one by `docker stop`; it starts again."""
        streams = self._speaking()
        say(f"drain: {self._operator.run('drain', 'worker-1', '--keep')}")
        container, before = self._deployment.inspect("worker-0")["Id"], self._counts()
        began = time.monotonic()
        call(["docker", "stop", container])
        took_s = time.monotonic() - began
        self._compare(streams.texts(), "worker-0 was stopped")
        live = self._live_at_its_end()
        moved = self._none_continued(before, moved_min=max(1, live))
        say(
            f"docker stop of worker-0: gone after {took_s:.1f} s, of {live} requests {moved} moved, none continued, "
            f"texts identical, longest pause {streams.gap_s:.3f} s"
        )
        self._one_socket()
        self._deployment.compose("start", "worker-0")

    def back(self, limit_s: float) -> None:
        """Until the stopped worker serves again, and nothing that moved has left a block anywhere."""
        wait("worker-0 to be back", limit_s, lambda: is_healthy(self._deployment.inspect("worker-0")))
        self._no_block_left()

    def _speaking(self) -> Streams:
        streams = Streams(self._api, MANY_TOKENS, FRESH_PROMPTS)
        streams.wait_until_all_speak()
        return streams

    def _compare(self, texts: Sequence[str], when: str) -> None:
        for text, wanted in zip(texts, self._undisturbed, strict=True):
            if text != wanted:
                raise Failed(f"a text changed when {when}:\n{wanted!r}\n{text!r}")

    def _counts(self) -> tuple[float, float]:
        page = f"{self._api.url}/metrics"
        return counter_of(page, CONTINUATIONS) - counter_of(page, SILENCES), counter_of(page, MOVED)

    def _none_continued(self, before: tuple[float, float], *, moved_min: int) -> int:
        """Return the number of moves that ingress counts. A request not moved in time is continued, which is slower."""
        continued, moved = (now - then for now, then in zip(self._counts(), before, strict=True))
        if continued or moved < moved_min:
            raise Failed(f"ingress counts {moved:.0f} moves, not {moved_min}, and {continued:.0f} continuations")
        return int(moved)

    def _live_at_its_end(self) -> int:
        """Return the number of requests that the stopped worker had when told to stop. Its migrator outlives it."""
        state = self._deployment.inspect("worker-0")["State"]
        if state["Running"] or state["ExitCode"]:
            raise Failed(f"worker-0 did not end in order: {state}")
        logs = self._deployment.compose("logs", "--no-color", "--no-log-prefix", "worker-0")
        said = [json.loads(line) for line in logs.splitlines() if line.startswith("{")]
        drains = [line for line in said if line.get("event") == "draining"]
        if not drains:
            raise Failed("worker-0 does not say that it drains")
        return int(drains[-1]["live"])

    def _one_socket(self) -> None:
        """An engine that ends takes its socket with it; the one that is left has its own."""
        sockets = self._deployment.compose("exec", "-T", "worker-1", "ls", "/kv").split()
        if len(sockets) != 1:
            raise Failed(f"one engine runs, and the shared folder holds {sockets}")

    def _no_block_left(self) -> None:
        query = "millrace_worker_blocks_total - millrace_worker_blocks_free"
        wait("every block to be free on both workers", 60, lambda: self._prometheus.query(query) == [0.0, 0.0])
        say("no block is in use on either worker")

    def _one_tree(self, request: str) -> None:
        folder = self._work / "traces"
        folder.mkdir(exist_ok=True)

        def trouble() -> str:
            spans = self._deployment.compose("exec", "-T", "otel-collector", "sh", "-c", "cat /tmp/traces/*.jsonl")
            (folder / "collector.jsonl").write_text(spans)
            return what_is_wrong(spans_of(folder, request_of(request)))

        try:
            wait("spans", 60, lambda: not trouble())
        except Failed:
            raise Failed(f"no whole trace of {request} in the collector: {trouble()}") from None
        spans = spans_of(folder, request_of(request))
        services = sorted({span.instance for span in spans})
        say(f"trace: one tree of {len(spans)} spans from {', '.join(services)}")
        for line in draw(spans, width=160)[:TREE_LINES]:
            say(f"  {line}")


def what_is_wrong(spans: Sequence[SpanLine]) -> str:
    """Explain why these are not one tree in which a sequence moves there and back; empty where they are."""
    roots = build(list(spans))
    if len(roots) != 1:
        return f"{len(roots)} roots: {[root.span.name for root in roots]}"
    moved = [span for span in spans if span.name == "migration" and attribute(span, "outcome") == "moved"]
    ways = [(attribute(span, "source"), attribute(span, "target")) for span in moved]
    if len(ways) < 2 or ways[0] != ways[-1][::-1]:
        return f"migrations {ways}"
    if not all(span.events for span in moved):
        return "a migration without events of its rounds"
    return ""


def show_conversation(lines: Sequence[str], request: str) -> None:
    """Shows the first migration of a request as tap heard it.

    Raises:
        Failed: a part of it was not heard.
    """
    own = [line for line in lines if request in line]
    if not (finished := of_type("MigrationFinished", own)):
        raise Failed(f"tap heard no end of a migration of {request}")
    (name,) = re.findall(r" migration=(\w+)", finished[0])
    said = [of_type(kind, own)[0] for kind in CONVERSATION[:ASKED] if of_type(kind, own)]
    said += [line for line in own if f"={name} " in f"{line} "]
    if silent := [kind for kind in CONVERSATION if not of_type(kind, said)]:
        raise Failed(f"tap heard no {', '.join(silent)} of {name}:\n" + "\n".join(said))
    for line in said:
        say(f"tap: {line}")


def lines_of(heard: Path) -> list[str]:
    """The lines that tap has written so far."""
    return heard.read_text().splitlines()


def of_type(kind: str, lines: Sequence[str]) -> list[str]:
    """Those of a message type, in any version."""
    return [line for line in lines if re.search(rf"→ {kind}(/\d+)? ", line)]
