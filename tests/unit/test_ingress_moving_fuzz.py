"""Migration at ingress among losses, repetitions, reorderings and deaths: one history in the log, one end."""

from random import Random

from services.ingress.lifecycle import (
    Cancelled,
    ForecastsReceived,
    ForecastsRequested,
    SequencePhase,
    SubmissionRefused,
)
from services.ingress.transitions import TRANSITIONS
from tests.unit.ingress_core import EOS
from tests.unit.ingress_moving_world import TOKENS_MAX, Profile, World

SEEDS = range(200)
STEPS = 400

#: About every eightieth token ends one.
STOPS = tuple(first + second for first in "abc" for second in "xyz")

#: Its policy asks no predictor, its workers refuse nothing, and nobody leaves within the one answer of a target.
NEVER_FIRED = {
    (SequencePhase.WAITING, ForecastsRequested),
    (SequencePhase.FORECASTING, ForecastsReceived),
    (SequencePhase.FORECASTING, Cancelled),
    (SequencePhase.SUBMITTED, SubmissionRefused),
    (SequencePhase.VERIFYING, Cancelled),
}


def run(seed: int) -> World:
    rng = Random(seed)
    profile = Profile(
        loss=rng.choice((0.0, 0.05, 0.25)),
        word_loss=rng.choice((0.0, 0.5, 0.9)),
        repeat=rng.choice((0.0, 0.2)),
        death=rng.choice((0.0, 0.01, 0.02)),
        brought=rng.choice((TOKENS_MAX, 2, 0)),
        stream=rng.random() < 0.7,
        stop=rng.choice(((), STOPS)),
    )
    world = World(rng, profile)
    leaves_at = rng.randrange(STEPS * 8)
    for step in range(STEPS):
        world.step()
        if step == leaves_at:
            world.abandon()
    world.heal()
    return world


def check(world: World, seed: int) -> None:
    state = world.bench.actor.state
    assert len(world.ends) == 1, seed
    assert [f.outcome for f in world.finished] in ([], ["completed"], ["cancelled"], ["failed"]), seed
    assert len(world.sequence.log) <= TOKENS_MAX, seed
    whole = "".join(chr(ord("a") + token) for token in world.sequence.log if token != EOS)
    text = min((whole.partition(stop)[0] for stop in world.profile.stop), key=len, default=whole)
    if world.ends == ["CompleteCall"]:
        assert (world.accepted, world.shown, world.told) == (1, text, len(world.sequence.log)), seed
    else:
        assert text.startswith(world.shown), seed
        assert world.profile.death or world.ends == ["CallAbandoned"], f"{seed}: nothing was lost for good"
    assert (state.calls, state.sequences, state.granted, state.owned) == ({}, {}, {}, {}), seed
    assert all(worker.held is None for worker in world.workers.values()), f"{seed}: somebody decodes for nobody"


def test_whatever_happens_the_log_is_one_history_and_the_end_is_one():
    outcomes, taken = set(), set()
    for seed in SEEDS:
        world = run(seed)
        check(world, seed)
        outcomes |= {outcome for (outcome,) in world.bench.metrics.migrations.counts}
        taken |= world.bench.transitions.taken
    assert outcomes == {"moved", "rescued", "stayed", "replaced", "lost", "ended", "refused"}
    assert not {(row.state, row.event) for row in TRANSITIONS} - taken - NEVER_FIRED
