"""A predictor's state of each instance."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from millrace.contracts.status import InstanceRecord, StatusSnapshot
from millrace.enginemodel.forecast.forecaster import Forecaster
from millrace.enginemodel.forecast.question import Candidate
from millrace.enginemodel.parameters import EngineParameters
from millrace.membership.member import Member

from services.predictor.calibration import Calibration
from services.predictor.prefixes import Prefixes

#: Bound of any length that a snapshot may tell, tokens or blocks; larger numbers are absurd, and would not fit an
#: engine's own integers.
LENGTH_MAX = 1 << 31

#: Doubled work of one step that a step's cost can be computed of, tokens²; a step's longest time (an hour); and the
#: year 2262, where 63 bits of nanoseconds end.
WORK_MAX, STEP_NS_MAX, TIME_MAX = 1 << 50, 3_600_000_000_000, (1 << 63) - 1

#: Sequences in one snapshot: vLLM's own shows at most 4,096 waiting ones.
SEQUENCES_MAX = 16_384

#: A snapshot from further ahead comes from a wrong clock. Taken, it would make all right ones after it look old.
AHEAD_NS_MAX = 1_000_000_000

#: A snapshot that does not show a placement this long after it never will: it was refused, or ended in between.
SHOWN_WITHIN_NS = 100_000_000


@dataclass(slots=True)
class PlacedSequence:
    """A sequence that was placed and that no snapshot shows yet.

    Attributes:
        at_ns: When the engine has it: the decision and the way there.
    """

    candidate: Candidate
    at_ns: int


@dataclass(slots=True)
class Instance:
    """One instance.

    Attributes:
        parameters: Of its scheduler, as its record says.
        prefixes: What its prefix cache is believed to hold.
        snapshot: The last one of this incarnation; None before.
        busy: Whether it shows work.
        told_ns: When ``snapshot`` was last said to hold.
        placements: By sequence id, in order of decision.
        forecaster: State rolled forward; None where it has to be built anew.
        rolled: The snapshot that it was loaded from; None where it has to be loaded.
        scale: Factor on step times that answers stand on.
        scale_told: The one that ``forecaster`` was told.
        lengths_version: Of the learnt lengths that it was built with.
    """

    record: InstanceRecord
    parameters: EngineParameters
    calibration: Calibration
    member: Member
    prefixes: Prefixes = field(init=False)
    told_ns: int = 0
    snapshot: StatusSnapshot | None = None
    busy: bool = False
    placements: dict[str, PlacedSequence] = field(default_factory=dict)
    forecaster: Forecaster | None = None
    rolled: StatusSnapshot | None = None
    rolled_ns: int = 0
    scale: float = 1.0
    scale_told: float = 1.0
    lengths_version: int = -1
    fits: int = -1

    def __post_init__(self) -> None:
        self.prefixes = prefixes_of(self.parameters)

    def age_ns(self, now_ns: int) -> int:
        """Age of what is rolled forward. An idle engine's state is as fresh as the last word of it."""
        assert self.snapshot is not None
        at_ns = self.snapshot.at_ns
        age_ns = now_ns - (at_ns if self.busy or at_ns > self.told_ns else self.told_ns)
        return age_ns if age_ns > 0 else 0

    def refusal(self, snapshot: StatusSnapshot, now_ns: int) -> str | None:
        """Reason why a snapshot is not taken; None where it is."""
        if snapshot.model != self.record.model:
            return "other_model"
        if not self.record.incarnation == snapshot.incarnation == self.member.incarnation > self.member.dead_through:
            return "other_incarnation"
        known = self.snapshot
        if known is not None and (snapshot.step < known.step or snapshot.at_ns < known.at_ns):
            return "old"
        if snapshot.at_ns > now_ns + AHEAD_NS_MAX:
            return "ahead"
        return None if _plausible_step(snapshot) else "absurd"

    def take(self, snapshot: StatusSnapshot, now_ns: int) -> None:
        """Replaces the snapshot. One that is told again confirms the state and changes nothing."""
        known = self.snapshot
        self.told_ns = now_ns
        if known is None or snapshot.step > known.step:
            self.calibration.observe(snapshot, known)
        if known is not None and snapshot.step == known.step and snapshot.at_ns == known.at_ns:
            return
        self.snapshot, self.busy = snapshot, bool(snapshot.running or snapshot.waiting)
        self.prefixes.shrink(snapshot.blocks_free)
        self.rolled = None

    def lose(self) -> None:
        """Its process ended: nothing of it holds any more."""
        self.snapshot = self.rolled = self.forecaster = None
        self.busy = False
        self.placements.clear()
        self.prefixes = prefixes_of(self.parameters)

    def place(self, sequence: str, placement: PlacedSequence) -> None:
        self.placements[sequence] = placement
        if self.rolled is not None and self.forecaster is not None:
            self.forecaster.add(sequence, placement.candidate, max(placement.at_ns, self.rolled_ns))

    def remove(self, sequence: str) -> None:
        if self.placements.pop(sequence, None) is not None:
            self.prefixes.drop(sequence)
            if self.forecaster is not None:  # also where it is to be loaded anew: it keeps placements over that
                self.forecaster.forget(sequence)

    def facts(self) -> dict[str, Any]:
        return {
            "model": self.record.model,
            "incarnation": self.record.incarnation,
            "step": self.snapshot.step if self.snapshot is not None else None,
            "heard_ns": self.member.heard_ns,
            "state": str(self.member.state),
            "placements": list(self.placements),
            "step_time": self.record.step_time,
            "scale": self.scale,
            "fits": self.calibration.kin.fits,
            "cached_blocks": len(self.prefixes),
        }

    def drop_shown(self) -> list[str]:
        """Lets go of placements that the snapshot shows, or should show by now. Returns their sequences."""
        snapshot = self.snapshot
        if snapshot is None or not self.placements:
            return []
        shown = {entry.sequence for entry in snapshot.running}
        shown.update(entry.sequence for entry in snapshot.waiting)
        # Two steps may pass: one that was under way when it came, and one that had it in its batch.
        late_ns = snapshot.at_ns - SHOWN_WITHIN_NS - 2 * snapshot.step_duration_ns
        gone = [name for name, each in self.placements.items() if name in shown or each.at_ns < late_ns]
        for name in gone:
            del self.placements[name]
        return gone


def prefixes_of(parameters: EngineParameters) -> Prefixes:
    """An engine's prefix cache as it is when it starts."""
    in_order = not parameters.long_prefill_token_threshold
    return Prefixes(parameters.block_size, caching=parameters.prefix_caching, in_order=in_order)


def _plausible_step(snapshot: StatusSnapshot) -> bool:
    """Whether blocks and the last step are such that an engine can have them. Looked at with every snapshot."""
    if not 0 <= snapshot.blocks_free <= snapshot.blocks_total < LENGTH_MAX or not 0 <= snapshot.at_ns < TIME_MAX:
        return False
    batch = snapshot.batch
    counts = (batch.decodes, batch.prefills, batch.prefill_tokens, batch.context_tokens, batch.longest_context)
    if not 0 <= min(counts) <= max(counts) < LENGTH_MAX or batch.prefill_context_tokens > batch.context_tokens:
        return False
    # What is not a number is in no range.
    return 0 <= batch.prefill_work < WORK_MAX and 0 <= snapshot.step_duration_ns < STEP_NS_MAX


def plausible(snapshot: StatusSnapshot) -> bool:
    """Whether its sequences are such that an engine can have them. Looked at before they are rolled forward."""
    if len(snapshot.running) + len(snapshot.waiting) > SEQUENCES_MAX:
        return False
    held = 0
    for entry in (*snapshot.running, *snapshot.waiting):
        if not (0 < entry.prompt_tokens < LENGTH_MAX and 0 <= entry.output_tokens < LENGTH_MAX and entry.blocks >= 0):
            return False
        if not (0 <= entry.computed_tokens <= entry.prompt_tokens + entry.output_tokens and entry.max_tokens >= 0):
            return False
        held += entry.blocks
    return held < LENGTH_MAX
