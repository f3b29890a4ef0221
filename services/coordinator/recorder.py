"""Recorder: keeps what a replay of the last hour needs, of the models that are led here.

An actor of its own, hosted in the coordinator's process, which hears decisions, outcomes and summaries anyway. Owns the
requests that are under way and the first blocks of recent prompts. The shell writes the rows.

| message in | change | messages out |
|---|---|---|
| DecisionMade | what was asked, which prompt it begins like | |
| RequestFinished | one row | |
| InstanceSummary | what its engine did since the one before | |
| KeyChanged(instance) | one row before the next others, where that is new | |
| RecordingFailed | | Log, once |
| TimerFired(tick) | | KeepRows |
| StopRequested | | KeepRows, Stop |

Overload: OPEN_MAX requests under way and BLOCKS_MAX blocks are known; of more the oldest are forgotten, and their rows
say less.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec
from millrace.actor.effects import Effect, Log
from millrace.contracts.local import KeyChanged
from millrace.contracts.message import Body
from millrace.contracts.observers import DecisionMade, RequestFinished
from millrace.contracts.status import EngineTotals, InstanceRecord, InstanceSummary
from millrace.kvcache.chain import unpack_hashes
from millrace.workloads.recording import InstanceSeen, RecordingRow, RequestServed, StepsComputed

from services.coordinator.config import CoordinatorConfig
from services.coordinator.led_models import Controller

#: Requests under way.
OPEN_MAX = 65_536

#: Blocks whose first request is known: prompts of two million tokens in blocks of 16, in about 20 MB.
BLOCKS_MAX = 1 << 17


class KeepRows(Effect, frozen=True, kw_only=True):
    """Appends rows to the recording."""

    rows: list[RecordingRow]


class RecordingFailed(Body, frozen=True, kw_only=True, tag="local.RecordingFailed/1"):
    """Rows could not be written: they are lost, and the next ones are tried."""

    detail: str


class _Busy:
    """Work of an engine since the last row."""

    __slots__ = ("before", "counted", "preemptions", "wall_ns")

    def __init__(self, before: InstanceSummary) -> None:
        self.before = before
        self.wall_ns = 0
        self.counted = EngineTotals()
        self.preemptions = before.preemptions


class RecorderActor(Controller):
    """Records the load of the models that are led here."""

    def __init__(self, config: CoordinatorConfig, *, incarnation: int) -> None:
        super().__init__(config, by="recorder", incarnation=incarnation)
        self._requests = 0
        self._open: OrderedDict[str, RequestServed] = OrderedDict()
        self._blocks: OrderedDict[int, int] = OrderedDict()
        self._busy: dict[str, _Busy] = {}
        self._seen: dict[str, InstanceRecord] = {}
        self._unwritten: set[str] = set()
        self._rows: list[RecordingRow] = []
        self._failed = ""

    def _hears(self) -> list[str]:
        return [self._subjects.summaries(), self._subjects.decisions(), self._subjects.outcomes()]

    def _on(self, body: Body, reply_to: str, now_ns: int) -> list[Effect]:
        match body:
            case InstanceSummary():
                record = self._led.on_summary(body)
                if record is not None and self._led.leads(record.model, now_ns):
                    self._on_summary(body)
            case DecisionMade():
                if body.kind == "dispatch" and body.chosen and self._led.leads(body.model, now_ns):
                    self._on_decision(body)
            case RequestFinished():
                if not body.attempts and self._led.leads(body.model, now_ns):
                    self._on_finished(body)
            case KeyChanged():
                self._led.on_key(body, now_ns)
                if isinstance(body.value, InstanceRecord):
                    self._on_instance(body.value)
            case RecordingFailed():
                return self._on_failed(body)
        return []

    def _on_instance(self, record: InstanceRecord) -> None:
        known = msgspec.structs.replace(record, kv=None, kv_refusal="")
        if self._seen.get(record.instance) != known:
            self._seen[record.instance] = known
            self._unwritten.add(record.instance)

    def _on_decision(self, body: DecisionMade) -> None:
        if body.request in self._open:
            return  # another choice of it
        number, self._requests = self._requests, self._requests + 1
        hashes = unpack_hashes(body.block_hashes)
        like, shared = self._beginning(hashes)
        self._keep_blocks(hashes[shared:], number)
        self._open[body.request] = RequestServed(
            number=number,
            at_ns=0,
            prompt=0,
            outputs=(),
            max_tokens=body.max_tokens,
            expected=body.expected_output_tokens,
            policy=body.policy,
            block_size=body.block_size,
            like=like,
            shared=shared,
        )
        if len(self._open) > OPEN_MAX:
            self._open.popitem(last=False)

    def _beginning(self, hashes: tuple[int, ...]) -> tuple[int, int]:
        """The request that a prompt begins like, and how many blocks are equal: a hash covers all blocks before it."""
        like, shared = -1, 0
        for shared, block in enumerate(hashes):
            first = self._blocks.get(block)
            if first is None:
                return like, shared
            self._blocks.move_to_end(block)
            like = first
        return like, len(hashes)

    def _keep_blocks(self, hashes: tuple[int, ...], number: int) -> None:
        for block in hashes:
            self._blocks[block] = number
        while len(self._blocks) > BLOCKS_MAX:
            self._blocks.popitem(last=False)

    def _on_finished(self, body: RequestFinished) -> None:
        asked = self._open.pop(body.request, None)
        if asked is None:
            return  # it was placed before this coordinator led its model
        self._keep_blocks(unpack_hashes(body.block_hashes), asked.number)
        self._rows.append(
            msgspec.structs.replace(
                asked,
                at_ns=body.arrival_ns,
                prompt=body.prompt_tokens,
                outputs=tuple(body.output_tokens),
                model=body.model,
                outcome=body.outcome,
                ttft_ns=-1 if body.ttft_ns is None else body.ttft_ns,
                e2e_ns=body.e2e_ns,
                placed_ns=max(0, body.placed_ns - body.arrival_ns),
                cached=body.cached_tokens,
                instance=body.instances[-1] if body.instances else "",
                moves=body.migrations + body.continuations,
            )
        )

    def _on_summary(self, body: InstanceSummary) -> None:
        busy = self._busy.get(body.instance)
        if busy is None or busy.before.incarnation != body.incarnation:
            self._busy[body.instance] = _Busy(body)
            return
        before, busy.before = busy.before, body
        if before.indicators is None or body.indicators is None:
            return
        was, now = before.indicators.totals, body.indicators.totals
        # An engine that was idle at either end paused meanwhile: its time in steps counts. Most prompts come to one.
        paused = not (before.running and body.running)
        busy.wall_ns += now.busy_ns - was.busy_ns if paused else max(0, body.at_ns - before.at_ns)
        pairs = zip(*map(msgspec.structs.astuple, (busy.counted, was, now)), strict=True)
        busy.counted = EngineTotals(*(sum_ + later - earlier for sum_, earlier, later in pairs))

    def _on_stop(self, now_ns: int) -> list[Effect]:
        return self._on_tick(now_ns)

    def _on_tick(self, now_ns: int) -> list[Effect]:
        for known in (self._busy, self._seen):
            for name in known.keys() - self._led.records.keys():
                del known[name]
        rows, self._rows = [*self._rows, *self._steps(now_ns)], []
        if not rows:
            return []  # a standby has nothing to say of instances either
        new, self._unwritten = sorted(self._unwritten & self._seen.keys()), set()
        instances = (InstanceSeen(record=self._seen[name]) for name in new)
        return [KeepRows(rows=[*instances, *rows])]

    def _steps(self, now_ns: int) -> list[RecordingRow]:
        found: list[RecordingRow] = []
        for name in [name for name, busy in self._busy.items() if busy.counted.steps]:
            busy = self._busy[name]
            found.append(
                StepsComputed(
                    instance=name,
                    at_ns=now_ns,
                    wall_ns=busy.wall_ns,
                    steps=busy.counted.steps,
                    decodes=busy.counted.decodes,
                    prefill_tokens=busy.counted.prefill_tokens,
                    context_tokens=busy.counted.context_tokens,
                    waiting=busy.before.waiting,
                    preemptions=busy.before.preemptions - busy.preemptions,
                )
            )
            self._busy[name] = _Busy(busy.before)
        return found

    def _on_failed(self, body: RecordingFailed) -> list[Effect]:
        """Said once, not with each tick of a full disk."""
        if body.detail == self._failed:
            return []
        self._failed = body.detail
        return [Log(level="warning", event="recording_failed", fields={"detail": body.detail})]

    def snapshot(self) -> dict[str, Any]:
        return {"recorded_open": len(self._open), "recorded_blocks": len(self._blocks), "recorded": self._number}

    def check_invariants(self) -> None:
        assert len(self._open) <= OPEN_MAX
        assert len(self._blocks) <= BLOCKS_MAX
