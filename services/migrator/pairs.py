"""Figures of pairs of instances: measured bandwidth between machines, steps of targets, prefixes that were sent there.

Owned by one migrator, about its own moves; bounded by number, the oldest forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeVar

import msgspec
from millrace.contracts.status import InstanceRecord, InstanceSummary
from millrace.policies.migration.view import TargetQuestion, TargetView

K = TypeVar("K")
V = TypeVar("V")

#: Pairs of machines, and targets, of which anything is kept.
PAIRS_MAX = 1024

#: Block hashes kept per target: its cache has about as many blocks, and forgets the oldest as well.
HASHES_MAX = 65_536

#: Weight of the last pull in a bandwidth. Pulls below so many bytes measure the handshake.
PULL_WEIGHT = 0.2
PULL_BYTES_MIN = 1 << 18

#: A step time is a mean over at least so many steps.
STEPS_MIN = 8


class PairFigures:
    """Measured bandwidths, step times, and blocks that were sent."""

    def __init__(self) -> None:
        self._rates: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._steps: OrderedDict[str, tuple[int, int, int, int]] = OrderedDict()  # incarnation, steps, busy, step ns
        self._sent: OrderedDict[str, OrderedDict[int, None]] = OrderedDict()

    # what is heard

    def pulled(self, source: InstanceRecord, target: InstanceRecord, count: int, duration_ns: int) -> None:
        """A pull of so many bytes."""
        if count < PULL_BYTES_MIN or duration_ns <= 0:
            return
        pair, rate = (_machine(source), _machine(target)), count * 1e9 / duration_ns
        before = self._rates.get(pair, rate)
        _keep(self._rates, pair, before + PULL_WEIGHT * (rate - before))

    def on_summary(self, body: InstanceSummary) -> None:
        """The steps that an instance has computed."""
        if body.indicators is None:
            return
        totals = body.indicators.totals
        incarnation, steps, busy_ns, step_ns = self._steps.get(body.instance, (body.incarnation, 0, 0, 0))
        if incarnation != body.incarnation or totals.steps < steps:
            steps, busy_ns, step_ns = totals.steps, totals.busy_ns, 0
        elif totals.steps - steps >= STEPS_MIN:
            step_ns = max(0, totals.busy_ns - busy_ns) // (totals.steps - steps)
            steps, busy_ns = totals.steps, totals.busy_ns
        _keep(self._steps, body.instance, (body.incarnation, steps, busy_ns, step_ns))

    def moved(self, target: str, hashes: Sequence[int]) -> None:
        """Full blocks that a target has since."""
        known = self._sent.get(target, OrderedDict())
        for block_hash in hashes:
            known.pop(block_hash, None)
            known[block_hash] = None
        while len(known) > HASHES_MAX:
            known.popitem(last=False)
        _keep(self._sent, target, known)

    # what follows

    def told(
        self,
        question: TargetQuestion,
        source: InstanceRecord,
        targets: dict[str, InstanceRecord],
        hashes: Sequence[int],
    ) -> TargetQuestion:
        """The question with what is known of each candidate.

        Args:
            question: Of the policy.
            source: Where the sequence is.
            targets: Records of the candidates.
            hashes: Of the sequence's full blocks, from the first on.
        """
        views = tuple(self._view(view, source, targets.get(view.name), hashes) for view in question.candidates)
        return msgspec.structs.replace(question, candidates=views)

    def _view(
        self, view: TargetView, source: InstanceRecord, target: InstanceRecord | None, hashes: Sequence[int]
    ) -> TargetView:
        if target is None:
            return view
        sent = self._sent.get(view.name, OrderedDict())
        there = next((index for index, each in enumerate(hashes) if each not in sent), len(hashes))
        return msgspec.structs.replace(
            view,
            bytes_per_s=self._rates.get((_machine(source), _machine(target)), 0.0),
            step_ns=self._steps.get(view.name, (0, 0, 0, 0))[3],
            blocks_there=there,
        )


def _machine(record: InstanceRecord) -> str:
    """Machine of an instance; an instance that does not tell is a machine of its own."""
    return (record.kv.machine if record.kv is not None else "") or f"/{record.instance}"


def _keep(table: OrderedDict[K, V], key: K, value: V) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > PAIRS_MAX:
        table.popitem(last=False)
