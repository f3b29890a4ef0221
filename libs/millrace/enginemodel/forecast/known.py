"""One instance as far as it is known: what every forecast of it starts from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from millrace.contracts.status import StatusSnapshot
from millrace.enginemodel.forecast.present import LengthRevision
from millrace.enginemodel.forecast.question import Placement
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_cost import FS_PER_NS, StepCost

NOTHING_CACHED: Mapping[str, int] = {}


class ForecastInput(msgspec.Struct, frozen=True, kw_only=True):
    """One instance as far as it is known.

    Attributes:
        snapshot: State right after a step; the next step began at its ``at_ns``, if there was work.
        cost: Of a step on this instance.
        now_ns: Time of the question, unix ns; what lies before the snapshot counts as its moment.
        pending: Placements that the snapshot does not show, in the order in which they were made.
        cached: By sequence, tokens of those waiting in the snapshot that are in the prefix cache.
    """

    snapshot: StatusSnapshot
    cost: StepCost
    parameters: EngineParameters
    lengths: LengthRevision
    now_ns: int
    pending: Sequence[Placement] = ()
    cached: Mapping[str, int] = NOTHING_CACHED

    @property
    def now_fs(self) -> int:
        """Since the snapshot, fs; a moment before it counts as its own."""
        return max(0, self.now_ns - self.snapshot.at_ns) * FS_PER_NS
