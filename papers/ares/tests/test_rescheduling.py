"""Central ARES against a transcription of algorithm 1 that simulates each candidate move."""

from __future__ import annotations

from statistics import pvariance

import msgspec
import numpy as np
import pytest

from papers.ares.rescheduling import DecodeInstance, Parameters, decide, weights

CASES = 1_000


def random_state(seed: int) -> tuple[DecodeInstance, ...]:
    """Some instances with some requests; few enough that the transcription ends soon."""
    rng = np.random.default_rng(seed)
    points = int(rng.integers(2, 8))
    return tuple(random_instance(rng, f"i{index}", points) for index in range(int(rng.integers(1, 6))))


def random_instance(rng: np.random.Generator, name: str, points: int) -> DecodeInstance:
    count = int(rng.integers(0, 6))
    rests = rng.integers(1, 400, count)
    lengths = rng.integers(1, 900, count)
    grown = np.arange(points) * int(rng.integers(5, 80))
    tokens = np.where(grown < rests[:, None], lengths[:, None] + grown, 0).astype(float)
    immovable = rng.integers(0, 500, points)
    return DecodeInstance(
        name=name,
        tokens=tokens.sum(axis=0) + immovable,
        requests=tuple(f"{name}.{row}" for row in range(count)),
        of_requests=tokens,
        rests=rests.astype(float),
        capacity_tokens=int(rng.integers(200, 6_000)),
        step_ns=int(rng.integers(5, 50)) * 1_000_000,
        move_ns=int(rng.integers(0, 2_000)) * 1_000_000,
    )


def transcribed(
    instances: tuple[DecodeInstance, ...], parameters: Parameters
) -> tuple[float, list[tuple[str, str, str]]]:
    """Algorithm 1, line by line: the best reduction, and every move that reaches it up to rounding."""
    points = len(instances[0].tokens)
    beta = weights(points, parameters.decay).tolist()
    loads = {one.name: sum(beta[t] * one.tokens[t] for t in range(1, points)) for one in instances}
    mean = sum(loads.values()) / len(loads)
    over = [one for one in instances if loads[one.name] > (1 + parameters.theta) * mean]
    under = [one for one in instances if one.tokens[0] < (1 + parameters.theta) * mean]
    candidates = [
        (row, source, target)
        for source in over
        for target in under
        if source is not target
        for row in range(len(source.requests))
        if source.rests[row] > source.move_ns / source.step_ns
        and target.tokens[0] + source.rests[row] <= target.capacity_tokens
    ]
    before = objective([list(one.tokens) for one in instances], beta)
    found = []
    for row, source, target in candidates:
        moved = source.of_requests[row]
        curves = [
            list(one.tokens - moved) if one is source else list(one.tokens + moved) if one is target else one.tokens
            for one in instances
        ]
        found.append((before - objective(curves, beta), (source.requests[row], source.name, target.name)))
    best = max((reduction for reduction, _ in found), default=0.0)
    return best, [move for reduction, move in found if reduction >= best - 1e-6 * max(1.0, before)]


def objective(curves: list[list[float]], beta: list[float]) -> float:
    """Equation 3."""
    return sum(beta[t] * pvariance([curve[t] for curve in curves]) for t in range(len(beta)))


@pytest.mark.parametrize("first", range(0, CASES, 100))
def test_the_move_is_that_of_the_transcription(first: int) -> None:
    moved = 0
    for seed in range(first, first + 100):
        state = random_state(seed)
        parameters = Parameters(theta=seed % 3 * 0.1, decay=0.7 + seed % 4 * 0.1)
        best, moves = transcribed(state, parameters)
        said = decide(state, parameters).moves
        if not said:
            assert best <= 1e-6 * max(1.0, best), seed
            continue
        (move,) = said
        assert (move.request, move.source, move.target) in moves, seed
        assert move.reduction == pytest.approx(best, rel=1e-6), seed
        moved += 1
    assert moved > 20


def test_further_moves_go_on_from_those_before_until_none_helps() -> None:
    wanted = Parameters(theta=0.0, moves_max=50, moves_per_instance=50)
    for seed in range(50):
        state = random_state(seed)
        said = decide(state, wanted)
        by_name = {one.name: one for one in state}
        assert len({move.request for move in said.moves}) == len(said.moves)
        curves = {one.name: one.tokens.copy() for one in state}
        beta = weights(len(state[0].tokens), wanted.decay).tolist()
        for move in said.moves:
            before = objective([list(curve) for curve in curves.values()], beta)
            source = by_name[move.source]
            tokens = source.of_requests[source.requests.index(move.request)]
            curves[move.source] = curves[move.source] - tokens
            curves[move.target] = curves[move.target] + tokens
            after = objective([list(curve) for curve in curves.values()], beta)
            assert before - after == pytest.approx(move.reduction, rel=1e-6)


def test_one_instance_gives_and_takes_no_more_than_it_may() -> None:
    heavy = random_instance(np.random.default_rng(1), "heavy", 4)
    rows = np.full((8, 4), 500.0)
    heavy = msgspec.structs.replace(
        heavy,
        tokens=rows.sum(axis=0),
        of_requests=rows,
        rests=np.full(8, 900.0),
        requests=tuple("abcdefgh"),
        move_ns=0,
        capacity_tokens=10_000,
    )
    idle = msgspec.structs.replace(
        heavy, name="idle", tokens=np.zeros(4), of_requests=np.empty((0, 4)), rests=np.empty(0), requests=()
    )
    assert len(decide((heavy, idle), Parameters(moves_max=9, moves_per_instance=2)).moves) == 2
    assert len(decide((heavy, idle), Parameters()).moves) == 1


def test_stated_cases_move_nothing_and_say_why() -> None:
    assert "no instance" in decide((), Parameters()).reason
    alone = random_instance(np.random.default_rng(2), "alone", 3)
    assert decide((alone,), Parameters()).reason == "nobody is overloaded"
    other = msgspec.structs.replace(alone, name="b", tokens=np.zeros(5))
    with pytest.raises(ValueError, match="points"):
        decide((alone, other), Parameters())


@pytest.mark.parametrize(
    "fields", [{"theta": -1.0}, {"theta": float("nan")}, {"decay": 0.0}, {"moves_max": 0}, {"moves_per_instance": 0}]
)
def test_a_parameter_that_makes_no_sense_is_refused_by_name(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        Parameters(**fields)
