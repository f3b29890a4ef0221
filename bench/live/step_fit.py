"""Step times out of a run's own snapshots: what the engine took beside everything else on its machine.

Snapshots come at most every 20 ms, so several steps lie between two of them. What these steps computed follows from the
two snapshots and from the outcomes of those that ended in between; how long they took, pauses included, is the time
between them. Unlike the durations of single steps, of which a snapshot tells the last one before it was due, and so
rather a long one, these times leave none out and count none twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from millrace.contracts.status import SequenceStatus, StatusSnapshot
from millrace.enginemodel.step_time_models import LinearStepTime
from scipy.optimize import nnls

#: Fewest windows that a fit is made of.
WINDOWS_MIN = 50


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """The steps between two snapshots of an engine that was busy all the time.

    Attributes:
        decodes, prefill_tokens, context_tokens, prefill_work: Sums over the steps, as in BatchComposition.
        prompted: Steps that computed any prompt; prompts, where these were fewer than steps.
        neighbours: Other engines of the host that computed meanwhile, on average over the time.
    """

    at_ns: int
    wall_ns: int
    steps: int
    decodes: int
    prefill_tokens: int
    context_tokens: float
    prefill_work: float
    prompted: int
    neighbours: float = 0.0

    @property
    def features(self) -> tuple[float, ...]:
        """In the order of a linear set's coefficients."""
        return (self.steps, self.decodes, self.prefill_tokens, self.context_tokens, self.prefill_work, self.prompted)


def windows(snapshots: Iterable[StatusSnapshot], outputs: Mapping[str, int]) -> list[Window]:
    """Of one instance.

    Args:
        outputs: Output tokens of every sequence that ended, by its id.
    """
    found = []
    before: StatusSnapshot | None = None
    for snapshot in sorted(snapshots, key=lambda each: (each.step, each.at_ns)):
        if before is not None and snapshot.step == before.step:
            continue  # told again
        window = None if before is None else _window(before, snapshot, outputs)
        if window is not None:
            found.append(window)
        before = snapshot
    return found


def _window(before: StatusSnapshot, later: StatusSnapshot, outputs: Mapping[str, int]) -> Window | None:
    """None where the engine may have been idle in between, or what it computed is not sure."""
    held = {entry.sequence: entry for entry in before.running}
    stayed = {entry.sequence for entry in later.running} & held.keys()
    if not stayed or before.preemptions != later.preemptions or before.incarnation != later.incarnation:
        return None
    decodes = context = 0.0
    prefill_tokens, work, prompts = 0, 0.0, 0
    for entry in later.running:
        first = held.pop(entry.sequence, None)
        began = 0 if first is None else first.computed_tokens
        prefilled = max(0, min(entry.computed_tokens, entry.prompt_tokens) - min(began, entry.prompt_tokens))
        prefill_tokens += prefilled
        prompts += prefilled > 0
        work += prefilled * (min(began, entry.prompt_tokens) + prefilled / 2)
        context += entry.prompt_tokens if prefilled else 0
        many = _decoded(first, entry.output_tokens)
        decodes += many
        context += many * (entry.prompt_tokens + entry.output_tokens - many / 2)
    for entry in held.values():
        total = outputs.get(entry.sequence)
        if total is None:
            return None
        many = total - entry.output_tokens
        decodes += many
        context += many * (entry.prompt_tokens + total - many / 2)
    steps, wall_ns = later.step - before.step, later.at_ns - before.at_ns
    if wall_ns <= 0:
        return None
    return Window(
        at_ns=later.at_ns,
        wall_ns=wall_ns,
        steps=steps,
        decodes=int(decodes),
        prefill_tokens=prefill_tokens,
        context_tokens=context,
        prefill_work=work,
        prompted=min(prompts, steps),
    )


def _decoded(first: SequenceStatus | None, output_tokens: int) -> int:
    """Tokens that came from decode steps; the first one came with the prompt."""
    before = 0 if first is None else first.output_tokens
    return output_tokens - before - (1 if before == 0 and output_tokens > 0 else 0)


def fit(rows: Sequence[Window], base: LinearStepTime | None = None) -> LinearStepTime:
    """Least squares on the windows' whole times: the sum of all steps comes out right, late ones included.

    Args:
        base: A set measured on an engine that has its core to itself. With it there are four unknowns in place of
            six: a factor on the set, and what each step, each decode and each step with a prompt costs besides, where
            the core is shared.

    Raises:
        ValueError: there are too few.
    """
    if len(rows) < WINDOWS_MIN:
        raise ValueError(f"{len(rows)} windows between snapshots are too few for step times; {WINDOWS_MIN} are needed")
    features, walls = matrix(rows)
    own = np.eye(features.shape[1])
    basis = own if base is None else np.stack([values(base), own[0], own[1], own[-1]])
    # Each window weighs by its length: a pause of the machine counts as it is, and does not turn the others' slopes.
    weights = 1 / np.sqrt(walls)
    weighted = (features @ basis.T) * weights[:, None]
    norms = np.linalg.norm(weighted, axis=0)
    norms[norms == 0] = 1.0
    solution = (nnls(weighted / norms, walls * weights)[0] / norms) @ basis
    solution *= walls.sum() / max(1.0, float((features @ solution).sum()))
    return LinearStepTime.fitted(solution)


def bias(model: LinearStepTime, rows: Sequence[Window]) -> tuple[float, float]:
    """Of windows that were not fitted: the sum of predicted over the sum of measured times, and mean |error|."""
    features, walls = matrix(rows)
    told = features @ values(model)
    return float(told.sum() / walls.sum()), float((np.abs(told - walls) / walls).mean())


#: Coefficients in the order of a window's features.
_COSTS = (*("fixed", "per_decode", "per_prefill_token", "per_context_token", "per_prefill_work", "per_prompted_step"),)


def values(model: LinearStepTime) -> npt.NDArray[np.float64]:
    """Costs in the order of a window's features, ns."""
    return np.array([getattr(model, name) for name in _COSTS], dtype=np.float64)


def matrix(rows: Sequence[Window]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Features and times of windows."""
    return np.array([row.features for row in rows], dtype=np.float64), np.array([row.wall_ns for row in rows], float)
