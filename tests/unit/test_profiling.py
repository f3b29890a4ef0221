"""The profile of an engine: which loads it runs, what it finds out, and what it writes."""

import json
from pathlib import Path

import msgspec
import pytest
from millrace.cli.__main__ import main
from millrace.contracts.status import BatchComposition
from millrace.enginemodel.coefficients import load_step_time
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_time_models import LinearStepTime
from millrace.profiling import plan, profile
from millrace.profiling.fitting import fit, judge, with_tail
from millrace.profiling.records import PlannedSequence, Round, RoundRecord, StepRecord
from millrace.profiling.writing import write

from tests.testbed.modelled_profile import ModelledProfile

TRUE = LinearStepTime(
    fixed=1_000_000,
    per_decode=20_000,
    per_prefill_token=5_000,
    per_context_token=100,
    per_prefill_work=8,
    per_prompted_step=300_000,
)
LIMITS = EngineParameters(max_model_len=512, max_sequences=8, token_budget=256, blocks_total=200, prefix_caching=False)
EFFORT = plan.Effort(output_tokens=6, prompt_tokens_max=1024, mixed_rounds=1)


def measured(*, noise: float = 0.0, model: LinearStepTime = TRUE) -> profile.Profile:
    engine = ModelledProfile("true", model, LIMITS, noise=noise)
    rounds = plan.rounds(LIMITS, EFFORT, seed=0)
    return profile.run(engine, rounds, profile.Options(repeats=2, command="test"), lambda done, total: None)


@pytest.mark.parametrize("seed", range(5))
def test_every_round_fits_into_the_engines_memory_and_batch(seed: int) -> None:
    for load in plan.rounds(LIMITS, EFFORT, seed):
        blocks = sum(-(-(each.prompt_tokens + each.output_tokens) // 16) for each in load.sequences)
        assert blocks <= LIMITS.blocks_total, load.name
        assert len(load.sequences) <= LIMITS.max_sequences
        assert max(each.prompt_tokens + each.output_tokens for each in load.sequences) <= LIMITS.max_model_len


def test_a_profile_finds_the_coefficients_of_the_engine_it_measures() -> None:
    found = measured().model

    bounds = {"fixed": 0.02, "per_decode": 0.05, "per_prefill_token": 0.1, "per_context_token": 0.05}
    for name, rel in (bounds | {"per_prompted_step": 0.1}).items():
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=rel), name


def test_what_any_prompt_costs_is_left_out_of_a_fit_that_is_not_asked_for_it() -> None:
    samples = [(step.batch, float(step.ns)) for step in measured().steps]

    assert fit(samples).per_prompted_step == 0
    assert judge(fit(samples, prompted=True), samples).mean < judge(fit(samples), samples).mean


def test_repeats_of_a_round_are_a_pass_apart() -> None:
    engine, ran, told = ModelledProfile("true", TRUE, LIMITS), [], []
    engine.run = lambda load: ran.append(load.name) or RoundRecord(round=load, steps=[])
    planned = [Round(name=name, sequences=()) for name in ("a", "b")]

    records = profile.passes(engine, planned, 3, lambda done, total: told.append((done, total)))

    assert ran == ["a", "b", "a", "b", "a", "b"]
    assert [[record.round.name for record in repeats] for repeats in records] == [["a"] * 3, ["b"] * 3]
    assert (told[0], told[-1]) == ((0, 6), (6, 6))


def test_noise_in_the_measurement_shows_in_the_errors_and_hardly_in_the_model() -> None:
    found = measured(noise=0.1)

    assert 0.01 < found.errors.mean < 0.12
    assert found.model.fixed == pytest.approx(TRUE.fixed, rel=0.1)


def test_whole_rounds_are_held_out_and_the_fit_does_not_see_them() -> None:
    found = measured()
    by_round: dict[str, set[bool]] = {}
    for step in found.steps:
        by_round.setdefault(step.round, set()).add(step.held_out)

    assert all(len(kinds) == 1 for kinds in by_round.values())
    assert found.errors.steps == sum(step.held_out for step in found.steps)
    assert 0.2 < sum(True in kinds for kinds in by_round.values()) / len(by_round) < 0.45


def test_a_cost_of_unequal_lengths_is_found_with_its_gate_where_there_is_one() -> None:
    truth = msgspec.structs.replace(TRUE, per_tail_token=2_000.0, tail_decodes=4)
    batches = [
        BatchComposition(decodes=count, context_tokens=count * mean, longest_context=mean * skew)
        for count in (2, 4, 8)
        for mean in (50, 200, 800)
        for skew in (1, 2)
    ]
    samples = [(batch, float(truth.duration_ns(batch))) for batch in batches]

    found = with_tail(TRUE, samples)

    assert found.per_tail_token == pytest.approx(2_000, rel=0.2)
    assert found.tail_decodes == 4
    assert judge(found, samples).mean < judge(TRUE, samples).mean
    assert with_tail(TRUE, [(batch, float(TRUE.duration_ns(batch))) for batch in batches]) == TRUE


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        fit([(BatchComposition(decodes=1, context_tokens=1), 1000.0)])


def test_repeats_that_compute_something_else_are_refused() -> None:
    load = Round(name="odd", sequences=(PlannedSequence(prompt_tokens=1, output_tokens=1),))
    one, other = (
        RoundRecord(round=load, steps=[_step(BatchComposition(prefills=1, prefill_tokens=tokens))]) for tokens in (1, 2)
    )

    with pytest.raises(ValueError, match="odd"):
        profile.least([one, other], False, set())


def test_the_least_disturbed_time_of_a_step_counts() -> None:
    load = Round(name="even", sequences=(PlannedSequence(prompt_tokens=1, output_tokens=1),))
    batch = BatchComposition(prefills=1, prefill_tokens=1)
    repeats = [RoundRecord(round=load, steps=[_step(batch, wall_ns=ns, cpu_ns=ns // 2)]) for ns in (900, 500, 700)]

    assert [step.ns for step in profile.least(repeats, False, set())] == [500]
    assert [step.ns for step in profile.least(repeats, True, set())] == [250]


def test_a_profile_writes_a_file_that_loads_as_the_same_model_and_what_it_was_made_of(tmp_path: Path) -> None:
    found = measured()

    parameters, measurements = write(found, tmp_path / "mine.toml")

    assert load_step_time(str(parameters)) == found.model
    content = json.loads(measurements.read_text())
    assert len(content["steps"]) == len(found.steps)
    assert found.model.per_prompted_step > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere", "--output", "a.toml"], "config.json"),
        (["model", "--output", "a.json"], ".toml"),
        (["model", "--output", "nowhere/a.toml"], "nowhere"),
        (["model", "--repeats", "0", "--output", "a.toml"], "--repeats"),
    ],
)
def test_the_verb_says_in_one_sentence_what_is_wrong(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *words]) == 1

    assert said in capsys.readouterr().err


def _step(
    batch: BatchComposition, *, sequences: tuple[int, ...] = (0,), wall_ns: int = 1, cpu_ns: int = 1
) -> StepRecord:
    return StepRecord(batch=batch, sequences=sequences, wall_ns=wall_ns, cpu_ns=cpu_ns)
