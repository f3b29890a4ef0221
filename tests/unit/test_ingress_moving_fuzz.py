"""Migration at ingress among losses, repetitions, reorderings and deaths: one history in the log, one end."""

from random import Random

import pytest

from tests.unit.ingress_moving_world import TOKENS_MAX, Profile, World

SEEDS = range(240)
STEPS = 400


def run(seed: int) -> World:
    rng = Random(seed)
    profile = Profile(
        loss=rng.choice((0.0, 0.05, 0.25)),
        word_loss=rng.choice((0.0, 0.5, 0.9)),
        repeat=rng.choice((0.0, 0.2)),
        death=rng.choice((0.0, 0.01, 0.02)),
        brought=rng.choice((TOKENS_MAX, 2, 0)),
    )
    world = World(rng, profile)
    leaves_at = rng.randrange(STEPS * 8)
    for step in range(STEPS):
        world.step()
        if step == leaves_at:
            world.abandon()
    world.heal()
    return world


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_the_log_is_one_history_and_the_end_is_one(seed):
    world = run(seed)
    state = world.bench.actor.state
    assert len(world.ends) == 1
    assert [f.outcome for f in world.finished] in ([], ["completed"], ["cancelled"], ["failed"])
    assert len(world.sequence.log) <= TOKENS_MAX
    assert not state.calls
    assert not state.sequences
    assert not state.granted
    assert not state.owned
    assert all(worker.held is None for worker in world.workers.values()), "somebody decodes for nobody"


def test_migrations_that_succeed_and_every_way_to_fail_are_among_them():
    outcomes: dict[str, int] = {}
    for seed in SEEDS:
        for (outcome,), count in run(seed).bench.metrics.migrations.counts.items():
            outcomes[outcome] = outcomes.get(outcome, 0) + count
    assert set(outcomes) == {"moved", "rescued", "stayed", "replaced", "lost", "ended", "refused"}
