"""A profile: runs all rounds on an engine, keeps of each step the least disturbed time, fits, and judges.

Repeats are passes over all rounds, not the same round again at once: what disturbs a machine lasts for tens of steps,
so that two runs of a round in a row are disturbed alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from millrace.contracts.status import BatchComposition
from millrace.enginemodel.step_time_models import LinearStepTime, Provenance
from millrace.profiling.fitting import Errors, Sample, fit, judge, with_tail
from millrace.profiling.records import Profiled, ProfilePort, Round, RoundRecord

#: Where the time per token may rise; the fit leaves out those where it does not.
BENDS = (64, 256, 1024)
HELD_OUT = 1 / 3


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a profile.

    Attributes:
        ns: The least of its repeats.
        held_out: Whether the fit did not see its round.
        fitted_ns: What the fitted model says.
    """

    round: str
    batch: BatchComposition
    ns: int
    held_out: bool
    fitted_ns: int = 0


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """All that a profile found: what is written beside the parameter file.

    Attributes:
        errors: Of the fit on rounds that were held out.
    """

    profiled: Profiled
    model: LinearStepTime
    errors: Errors
    steps: list[Measured]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a profile run.

    Attributes:
        repeats: Runs of each round; the least time of each step counts.
        seed: Of which rounds are held out.
        command: What was called, for the provenance.
    """

    repeats: int = 2
    seed: int = 0
    command: str = ""


def run(engine: ProfilePort, planned: list[Round], options: Options, progress: Callable[[int, int], None]) -> Profile:
    """Measures and fits.

    Args:
        progress: Called with rounds done and rounds in all, repeats counted.

    Raises:
        ValueError: too few steps to fit.
    """
    profiled = engine.profiled()
    return fitted(profiled, passes(engine, planned, options.repeats, progress), options)


def passes(
    engine: ProfilePort, planned: list[Round], repeats: int, progress: Callable[[int, int], None]
) -> list[list[RoundRecord]]:
    """Each round's repeats, so many seconds apart as all rounds take."""
    records: list[list[RoundRecord]] = [[] for _ in planned]
    whole = repeats * len(planned)
    for number in range(whole):
        progress(number, whole)
        records[number % len(planned)].append(engine.run(planned[number % len(planned)]))
    progress(whole, whole)
    return records


def fitted(profiled: Profiled, records: list[list[RoundRecord]], options: Options) -> Profile:
    """The fit of measured rounds, a third of which it does not see."""
    out = held_out_rounds([repeats[0].round.name for repeats in records], options.seed)
    measured = [step for repeats in records for step in least(repeats, profiled.steady_clock, out)]
    training = [sample(step) for step in measured if not step.held_out]
    model = with_tail(fit(training, bends=BENDS, absolute=True, prompted=True), training)
    errors = judge(model, [sample(step) for step in measured if step.held_out])
    return Profile(
        profiled=profiled,
        model=msgspec.structs.replace(model, provenance=provenance(profiled, errors, measured, options)),
        errors=errors,
        steps=[msgspec.structs.replace(step, fitted_ns=model.duration_ns(step.batch)) for step in measured],
    )


def held_out_rounds(names: list[str], seed: int) -> set[str]:
    """A third of the rounds: whole ones, since steps of one round are much alike."""
    chosen = sorted(names)
    random.Random(seed).shuffle(chosen)
    return set(chosen[: round(len(chosen) * HELD_OUT)])


def least(repeats: list[RoundRecord], steady_clock: bool, out: set[str]) -> list[Measured]:
    """Steps of a round with the least time of its repeats, which compute the same in the same order.

    Raises:
        ValueError: they do not.
    """
    name = repeats[0].round.name
    steps = []
    for same in zip(*(record.steps for record in repeats), strict=True):
        if any(step.batch != same[0].batch for step in same):
            raise ValueError(f"round {name}: its repeats computed different batches")
        ns = min(step.cpu_ns if steady_clock else step.wall_ns for step in same)
        steps.append(Measured(round=name, batch=same[0].batch, ns=max(1, ns), held_out=name in out))
    return steps


def sample(step: Measured) -> Sample:
    """For the fit."""
    return step.batch, float(step.ns)


def provenance(profiled: Profiled, errors: Errors, measured: list[Measured], options: Options) -> Provenance:
    """Return the provenance of the coefficients."""
    clock = "processor time" if profiled.steady_clock else "wall-clock time"
    fitted_on = sum(not step.held_out for step in measured)
    return Provenance(
        model=profiled.model,
        hardware=profiled.hardware,
        source=f"{profiled.engine}, {clock}, least of {options.repeats} repeats; {options.command}",
        error=f"{errors.said()}; fitted on {fitted_on}",
    )
