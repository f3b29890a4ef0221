"""A recording as a page shows it: what was heard of requests and engines, made again from its rows.

Tokens of a request come evenly between its first and its last, at the instance that it ended at: its moves and
forecasts are not recorded.
"""

from __future__ import annotations

from collections import deque
from heapq import merge
from operator import itemgetter

from millrace.contracts.local import KeyChanged, TimerFired
from millrace.contracts.message import Body, Message
from millrace.contracts.observers import DecisionMade, RequestFinished
from millrace.contracts.status import (
    BatchComposition,
    EngineTotals,
    InstanceRecord,
    SequenceState,
    SequenceStatus,
    StatusSnapshot,
)
from millrace.workloads.recording import RecordedLoad, RequestServed, StepsComputed
from msgspec.structs import replace

from services.page.effects import ShowFrame
from services.page.history import PageRun
from simulator.scenarios.shown_run import shown_actor

#: Frames of a run at most, and time between two of them at least, ns.
FRAMES_MAX, FRAME_NS = 6_000, 500_000_000


def recorded_run(load: RecordedLoad) -> PageRun:
    """The run that was recorded. Requests have the names that they have in a replay."""
    rows = [(f"r{number}", row) for number, (_, row) in enumerate(load.requests)]
    begin_ns, end_ns = rows[0][1].at_ns, max(row.at_ns + max(0, row.e2e_ns) for _, row in rows)
    pause_ns = max(FRAME_NS, (end_ns - begin_ns) // FRAMES_MAX)
    run = PageRun("recorded", shown_actor("recorded", begin_ns - FRAME_NS, begin_ns))
    engines = [_RecordedEngine(record, rows, load.steps) for record in load.instances.values()]
    for record in load.instances.values():
        known = KeyChanged(bucket="instance", key=record.instance, value=record, revision=1)
        run.actor.handle(Message(known), begin_ns - FRAME_NS)
    frames = ((at_ns, TimerFired(name="frame")) for at_ns in range(begin_ns, end_ns + 2 * pause_ns, pause_ns))
    placed = sorted(((row.at_ns + row.placed_ns, _placed(name, row)) for name, row in rows), key=itemgetter(0))
    ended = sorted(((row.at_ns + max(0, row.e2e_ns), _ended(name, row)) for name, row in rows), key=itemgetter(0))
    for at_ns, body in merge(placed, ended, frames, key=itemgetter(0)):
        snapshots: list[Body] = [each.snapshot(at_ns) for each in engines] if isinstance(body, TimerFired) else []
        for each in (*snapshots, body):
            for effect in run.actor.handle(Message(each), at_ns):
                if isinstance(effect, ShowFrame):
                    run.keep(effect)
    return run


def _placed(name: str, row: RequestServed) -> DecisionMade:
    return DecisionMade(
        request=name,
        sequences=[f"{name}.{number}" for number in range(len(row.outputs))],
        epoch=0,
        kind="dispatch",
        policy=row.policy,
        model=row.model,
        chosen=row.instance,
        reason="as recorded",
        at_ns=row.at_ns,
        prompt_tokens=row.prompt,
        max_tokens=row.max_tokens,
        expected_output_tokens=row.expected,
    )


def _ended(name: str, row: RequestServed) -> RequestFinished:
    return RequestFinished(
        request=name,
        model=row.model,
        outcome=row.outcome,
        ingress="",
        prompt_tokens=row.prompt,
        cached_tokens=row.cached,
        output_tokens=list(row.outputs),
        arrival_ns=row.at_ns,
        placed_ns=row.at_ns + row.placed_ns,
        ttft_ns=row.ttft_ns if row.ttft_ns >= 0 else None,
        e2e_ns=max(0, row.e2e_ns),
        instances=[row.instance] if row.instance else [],
        migrations=row.moves,
    )


class _RecordedEngine:
    """What one instance did, told in order of time."""

    def __init__(
        self, record: InstanceRecord, rows: list[tuple[str, RequestServed]], steps: list[StepsComputed]
    ) -> None:
        own = [(name, row) for name, row in rows if row.instance == record.instance]
        self._record = record
        self._coming = deque(sorted(own, key=lambda each: each[1].at_ns + each[1].placed_ns))
        self._open: list[tuple[str, RequestServed]] = []
        self._steps = deque(row for row in steps if row.instance == record.instance)
        self._totals = EngineTotals()
        self._waiting = self._preemptions = 0

    def snapshot(self, at_ns: int) -> StatusSnapshot:
        record = self._record
        while self._coming and self._coming[0][1].at_ns + self._coming[0][1].placed_ns <= at_ns:
            self._open.append(self._coming.popleft())
        self._open = [each for each in self._open if each[1].at_ns + each[1].e2e_ns > at_ns]
        self._compute(at_ns)
        there = [
            _status(f"{name}.{number}", row, tokens, at_ns)
            for name, row in self._open
            for number, tokens in enumerate(row.outputs)
        ]
        begun = [each for each in there if each.output_tokens]
        rest = [each for each in there if not each.output_tokens]
        waiting = min(len(rest), self._waiting)
        used = sum(-(-each.computed_tokens // record.block_size) for each in begun)
        return StatusSnapshot(
            instance=record.instance,
            incarnation=record.incarnation,
            model=record.model,
            step=self._totals.steps,
            at_ns=at_ns,
            running=[*begun, *rest[: len(rest) - waiting]],
            waiting=[replace(each, state=SequenceState.WAITING) for each in rest[len(rest) - waiting :]],
            blocks_free=max(0, record.blocks_total - used),
            blocks_total=record.blocks_total,
            preemptions=self._preemptions,
            step_duration_ns=0,
            batch=BatchComposition(),
            totals=self._totals,
        )

    def _compute(self, at_ns: int) -> None:
        while self._steps and self._steps[0].at_ns <= at_ns:
            row, was = self._steps.popleft(), self._totals
            self._waiting, self._preemptions = row.waiting, self._preemptions + row.preemptions
            self._totals = EngineTotals(
                steps=was.steps + row.steps, busy_ns=was.busy_ns + row.wall_ns, decodes=was.decodes + row.decodes
            )


def _status(sequence: str, row: RequestServed, tokens: int, at_ns: int) -> SequenceStatus:
    since_ns, span_ns = at_ns - row.at_ns - row.ttft_ns, max(1, row.e2e_ns - row.ttft_ns)
    output = min(tokens, 1 + int(tokens * since_ns / span_ns)) if row.ttft_ns >= 0 and since_ns >= 0 else 0
    computed = row.prompt + output if output else 0
    expected = None if row.expected is None else round(row.expected)
    return SequenceStatus(
        sequence, SequenceState.RUNNING, row.prompt, computed, output, row.max_tokens, 0, row.at_ns, expected
    )
