"""Central ARES: which move between instances lowers the weighted variance of their token loads most.

Algorithm 1 to the letter, holes included (README.md lists them), but for how it is computed: taking ``x`` tokens from
``a`` to ``b`` lowers the variance of ``n`` loads by ``2 / n * x * (a - b - x)``, so that all candidates of one source
are one matrix product instead of one simulation each.

Source: ARES, section 5.2, equations 3 and 4, algorithm 1.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters that the paper names without giving their values.

    Attributes:
        theta: Share above the mean from which an instance is overloaded; at least 0.
        decay: Weight of a point of the horizon over that of the one before it; above 0, at most 1.
        moves_max: Moves of one decision; the paper makes one. Each further one is chosen as if those before were done.
        moves_per_instance: From or to one instance in one decision; at least 1.
    """

    theta: float = 0.1
    decay: float = 0.9
    moves_max: int = 1
    moves_per_instance: int = 3

    def __post_init__(self) -> None:
        """Refuses what cannot be. Raises ValueError naming the field."""
        if not 0 <= self.theta < float("inf"):
            raise ValueError(f"theta must be at least 0 and finite, is {self.theta}")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must be above 0 and at most 1, is {self.decay}")
        for field in ("moves_max", "moves_per_instance"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, is {getattr(self, field)}")


class DecodeInstance(msgspec.Struct, frozen=True, kw_only=True):
    """One instance as its worker tells it.

    Attributes:
        tokens: (points,) KV tokens now and at each point of the horizon.
        requests: Ids of those that may move, each a row of ``of_requests``.
        of_requests: (requests, points) KV tokens of each; 0 after its predicted end.
        rests: (requests,) predicted remaining tokens.
        capacity_tokens: C_mem.
        step_ns: T_exec, of one decoding step here.
        move_ns: C_mig, of one move from here.
    """

    name: str
    tokens: Numbers
    requests: tuple[str, ...]
    of_requests: Numbers
    rests: Numbers
    capacity_tokens: int
    step_ns: int
    move_ns: int


class RescheduledMove(msgspec.Struct, frozen=True, kw_only=True):
    """One move.

    Attributes:
        reduction: By how much it lowers the objective, tokens squared.
    """

    request: str
    source: str
    target: str
    reduction: float


class Rescheduling(msgspec.Struct, frozen=True, kw_only=True):
    """Moves in the order in which they were chosen, and why there are no more."""

    moves: tuple[RescheduledMove, ...]
    reason: str


def decide(instances: tuple[DecodeInstance, ...], parameters: Parameters) -> Rescheduling:
    """The best moves; none where nobody is overloaded or no move lowers the objective.

    The curves of all instances must have equally many points. Ties go to the source, then the request, then the target
    that comes first.

    Raises:
        ValueError: they have not.
    """
    if len({len(instance.tokens) for instance in instances}) > 1:
        raise ValueError("curves have different numbers of points")
    if not instances:
        return Rescheduling(moves=(), reason="there is no instance")
    search = _Search(instances, parameters)
    moves: list[RescheduledMove] = []
    while len(moves) < parameters.moves_max and (move := search.best()) is not None:
        moves.append(move)
    return Rescheduling(moves=tuple(moves), reason=search.reason)


def weights(points: int, decay: float) -> Numbers:
    """Weights of equation 3: 1 for the present, β_t for each point of the horizon, whose sum is 1."""
    beta = decay ** np.arange(points - 1)
    return np.concatenate(([1.0], beta / beta.sum() if points > 1 else beta))


class _Search:
    """Loads as they would be after the moves chosen so far."""

    def __init__(self, instances: tuple[DecodeInstance, ...], parameters: Parameters) -> None:
        self._instances = instances
        self._parameters = parameters
        self._tokens = np.stack([instance.tokens for instance in instances]).astype(np.float64)
        self._capacity = np.array([instance.capacity_tokens for instance in instances], np.float64)
        self._weights = weights(self._tokens.shape[1], parameters.decay)
        self._moves = np.zeros(len(instances), int)
        self._able = [instance.rests > instance.move_ns / instance.step_ns for instance in instances]
        self.reason = ""

    def best(self) -> RescheduledMove | None:
        """Chooses the next move and carries it out on the loads."""
        overloaded, underloaded = self._classified()
        best, found = 0.0, None
        for source in overloaded:
            best, found = self._of_source(int(source), underloaded, best, found)
        if found is None:
            self.reason = "no move lowers the variance" if len(overloaded) else "nobody is overloaded"
            return None
        source, row, target = found
        origin = self._instances[source]
        self._tokens[source] -= origin.of_requests[row]
        self._tokens[target] += origin.of_requests[row]
        self._able[source] = self._able[source].copy()
        self._able[source][row] = False
        self._moves[[source, target]] += 1
        self.reason = "as many moves as one decision makes"
        name, to = origin.requests[row], self._instances[target].name
        return RescheduledMove(request=name, source=origin.name, target=to, reduction=best)

    def _classified(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Lines 11 to 16."""
        loads = self._tokens[:, 1:] @ self._weights[1:]
        threshold = (1 + self._parameters.theta) * loads.mean()
        free = self._moves < self._parameters.moves_per_instance
        over, under = (loads > threshold) & free, (self._tokens[:, 0] < threshold) & free
        return over.nonzero()[0], under.nonzero()[0]

    def _of_source(
        self, source: int, targets: NDArray[np.int64], best: float, found: tuple[int, int, int] | None
    ) -> tuple[float, tuple[int, int, int] | None]:
        """Lines 17 to 31 for one source: what was found so far, or something better."""
        origin = self._instances[source]
        rows = self._able[source].nonzero()[0]
        targets = targets[targets != source]
        if not len(rows) or not len(targets):
            return best, found
        moved = origin.of_requests[rows]
        weighted = moved * self._weights
        own = (weighted * (self._tokens[source] - moved)).sum(axis=1)
        gains = 2.0 / len(self._instances) * (own[:, None] - weighted @ self._tokens[targets].T)
        room = self._capacity[targets] - self._tokens[targets, 0]
        gains[origin.rests[rows][:, None] > room] = -np.inf
        place = int(gains.argmax())
        if gains.flat[place] <= best:
            return best, found
        row, column = divmod(place, len(targets))
        return float(gains.flat[place]), (source, int(rows[row]), int(targets[column]))
