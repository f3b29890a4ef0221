"""ARES's scheduler in one place: hears the snapshots of all instances, and has the best move made every second.

| message in | change | messages out |
|---|---|---|
| StatusSnapshot | the instance's sequences | |
| KeyChanged(plan) | who prefills only, and takes part in nothing | |
| TimerFired(tick) | what is chosen is under way | MigrateSequence |
| Replied, RequestFailed | no longer under way; what a move lasts | |

Brokers hand prefilled sequences over meanwhile and balance nothing. Overload: at most ``moves_max`` moves a tick; a
sequence under way is not chosen again. ``rescheduling.py`` decides, the algorithm to the letter.

A file for ``extension`` of a scenario whose sequences can move.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
from millrace.actor.effects import Effect, Request, StartTimer, Subscribe, WatchKeys
from millrace.contracts.catalog import Role
from millrace.contracts.local import KeyChanged, Replied, RequestFailed, TimerFired
from millrace.contracts.message import Message
from millrace.contracts.migration import MigrateSequence, MigrationFinished, MigrationOutcome
from millrace.contracts.plan import InstanceRole, Plan
from millrace.contracts.sequences import request_id_of
from millrace.contracts.status import SequenceState, SequenceStatus, StatusSnapshot
from millrace.contracts.subjects import Subjects

from papers.ares import rescheduling
from papers.ares.rescheduling import DecodeInstance, RescheduledMove, decide
from simulator.cluster import CLUSTER
from simulator.scenarios.cluster import ScenarioCluster

_MS = 1_000_000
#: How long a move may take.
MOVE_LIMIT_NS = 60_000 * _MS
#: Snapshots that are older say nothing.
AGE_NS = 1_500 * _MS
#: Share of a new move in what one is taken to last.
MOVE_SHARE = 0.2


class Parameters(rescheduling.Parameters, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Beside those of the algorithm.

    Attributes:
        interval_ms: Between two decisions; the paper's example is a second.
        horizon_ms, points: Of the forecast loads.
        move_ms: What a move is taken to last before the first one.
    """

    interval_ms: Annotated[int, msgspec.Meta(ge=1)] = 1_000
    horizon_ms: Annotated[int, msgspec.Meta(ge=1)] = 30_000
    points: Annotated[int, msgspec.Meta(ge=1)] = 16
    move_ms: Annotated[int, msgspec.Meta(ge=1)] = 100


class CentralAres:
    """Owns the last snapshots and what is under way.

    Attributes:
        name: Of the actor.
        results: Moves by how they ended.
    """

    def __init__(self, spec: Parameters, *, cluster: str, block_size: Mapping[str, int]) -> None:
        """Args: block_size: Tokens per block, by instance."""
        self.name = "central-ares"
        self.results: Counter[str] = Counter()
        self._spec = spec
        self._subjects = Subjects(cluster)
        self._block_size = block_size
        self._snapshots: dict[str, StatusSnapshot] = {}
        self._prefilling: set[str] = set()
        self._under_way: set[str] = set()
        self._move_ns = float(spec.move_ms * _MS)

    def start(self, now_ns: int) -> list[Effect]:
        """Listens to all instances."""
        return [WatchKeys(bucket="plan"), Subscribe(subject=f"{self._subjects.prefix}.status.*.*"), self._timer(now_ns)]

    def _timer(self, now_ns: int) -> StartTimer:
        return StartTimer(name="tick", at_ns=now_ns + self._spec.interval_ms * _MS)

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        """See the table above."""
        match message.body:
            case StatusSnapshot() as body:
                self._snapshots[body.instance] = body
            case KeyChanged(value=Plan(stages=stages)):
                roles = {name: role for stage in stages for name, role in stage.roles.items()}
                self._prefilling = {name for name, role in roles.items() if role is InstanceRole.PREFILL}
            case Replied(correlation=sequence, body=body):
                self._ended(sequence, body)
            case RequestFailed(correlation=sequence):
                self._ended(sequence, None)
            case TimerFired():
                return [*self._decided(now_ns), self._timer(now_ns)]
        return []

    def _ended(self, sequence: str, body: Any) -> None:
        self._under_way.discard(sequence)
        finished = body if isinstance(body, MigrationFinished) else None
        self.results[str(finished.outcome) if finished is not None else "unanswered"] += 1
        if finished is not None and finished.outcome is MigrationOutcome.MOVED:
            self._move_ns += MOVE_SHARE * (finished.cost.duration_ns - self._move_ns)

    def _decided(self, now_ns: int) -> list[Effect]:
        known = [
            self._instance(snapshot)
            for name, snapshot in sorted(self._snapshots.items())
            if name not in self._prefilling and now_ns - snapshot.at_ns < AGE_NS
        ]
        chosen = decide(tuple(known), self._spec)
        return [self._order(move, chosen.reason) for move in chosen.moves]

    def _order(self, move: RescheduledMove, reason: str) -> Request:
        self._under_way.add(move.request)
        body = MigrateSequence(
            sequence=move.request,
            target=move.target,
            note=f"lowers the weighted variance by {move.reduction:.3g} tokens²; {reason}",
        )
        return Request(
            subject=self._subjects.migrate(move.source, "start"),
            body=body,
            correlation=move.request,
            timeout_ns=MOVE_LIMIT_NS,
            request=request_id_of(move.request),
        )

    def _instance(self, snapshot: StatusSnapshot) -> DecodeInstance:
        step_ns = max(1, snapshot.step_duration_ns)
        grown = np.linspace(0.0, self._spec.horizon_ms * _MS / step_ns, self._spec.points + 1)
        running = snapshot.running
        lengths = np.array([status.prompt_tokens + status.output_tokens for status in running], np.float64)
        rests = np.array([_rest(status) for status in running], np.float64)
        tokens = np.where(grown < rests[:, None], lengths[:, None] + grown, 0.0)
        able = [row for row, status in enumerate(running) if self._may_move(status)]
        return DecodeInstance(
            name=snapshot.instance,
            tokens=tokens.sum(axis=0),
            requests=tuple(running[row].sequence for row in able),
            of_requests=tokens[able],
            rests=rests[able],
            capacity_tokens=snapshot.blocks_total * self._block_size[snapshot.instance],
            step_ns=step_ns,
            move_ns=round(self._move_ns),
        )

    def _may_move(self, status: SequenceStatus) -> bool:
        free = status.sequence not in self._under_way and not status.immovable
        return free and status.state is SequenceState.RUNNING and status.output_tokens >= 1

    def snapshot(self) -> dict[str, Any]:
        """Return the number of moves by how they ended."""
        return {"name": self.name, "results": dict(self.results)}

    def check_invariants(self) -> None:
        """It has none beyond its policy's."""


class CentralCluster(ScenarioCluster):
    """A scenario's cluster with this scheduler in it, which has the rights of an operator."""

    def _add_actors(self) -> None:
        super()._add_actors()
        sizes = {name: group.engine.block_size for name, group in self._groups.items()}
        made = CentralAres(Parameters(), cluster=CLUSTER, block_size=sizes)
        self.simulation.add(lambda _start: made, node="rescheduler", accepts=(StatusSnapshot,), role=Role.OPERATOR)


cluster = CentralCluster


def _rest(status: SequenceStatus) -> int:
    """Predicted rest, tokens; up to its bound where nothing is predicted."""
    expected = status.expected_output_tokens
    known = expected is not None and status.output_tokens < expected <= status.max_tokens
    return (expected if known and expected is not None else status.max_tokens) - status.output_tokens
