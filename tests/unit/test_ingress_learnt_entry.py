"""Entry by the prompt: which tiers a request is for, whose file is refused, and what a failed tier changes."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from millrace.cascade.entry import EntryModel, fit_entry, prompt_features
from millrace.cascade.entry_files import EntryUnreadable, fingerprints, read_entry, write_entry

from services.ingress.__main__ import read_learnt_entry
from services.ingress.cascade.entry import LearntEntry, choose_entry, enter
from services.ingress.config import CascadeConfig, ModelConfig, TierConfig
from tests.unit.cascade_core import MODELS, CascadeBench, logprob

EASY, HARD = "say hello", "solve 918273 * 564738 and explain each step"


@pytest.fixture(scope="module")
def model() -> EntryModel:
    """Small and middle are right on easy prompts only, large on half of the hard ones, too."""
    rng = np.random.default_rng(5)
    hard = rng.random(400) < 0.5
    rows = np.array([prompt_features(HARD if each else EASY, 3) for each in hard])
    right = np.column_stack([~hard, ~hard, ~hard | (rng.random(400) < 0.5)])
    fitted = fit_entry(rows, right, MODELS)
    return EntryModel(msgspec.structs.replace(fitted.file, costs=(1.0, 3.0, 9.0), value=50.0))


@pytest.mark.parametrize(
    ("chances", "usable", "tiers"),
    [
        ((0.97, 0.97, 0.97), (0, 1, 2), (0, 0)),
        ((0.5, 0.55, 0.95), (0, 1, 2), (0, 2)),
        ((0.05, 0.6, 0.9), (0, 1), (1, 1)),
    ],
)
def test_tiers_follow_chances_and_costs(
    chances: tuple[float, ...], usable: tuple[int, ...], tiers: tuple[int, int]
) -> None:
    costs = (1.0, 3.0, 9.0)[: len(usable)]
    decision = choose_entry(chances[: len(usable)], costs, usable, value=30.0)
    assert (decision.tier, decision.last) == tiers
    assert "by the prompt" in decision.reason


def test_what_a_client_asks_for_wins_and_without_an_estimate_the_first_tier_is_asked() -> None:
    learnt = choose_entry((0.05, 0.1, 0.9), (1.0, 3.0, 9.0), (0, 1, 2), value=30.0)
    assert enter("learnt", (0, 1, 2), given=None, learnt=learnt) is learnt
    assert enter("learnt", (0, 1, 2), given=1, learnt=learnt).tier == 1
    decision = enter("learnt", (1, 2), given=None)
    assert (decision.tier, decision.last) == (1, None)


def test_the_choice_tells_prompts_apart_by_the_names_of_the_plan(model: EntryModel) -> None:
    entry = LearntEntry(model, MODELS)
    easy, hard = entry.choose(MODELS, (0, 1, 2), EASY, 3), entry.choose(MODELS, (0, 1, 2), HARD, 3)
    assert (easy.tier, hard.tier) == (0, 2)
    swapped = entry.choose(("large", "small"), (0, 1), HARD, 3)
    assert swapped is not None
    small, _, large = hard.reason.removeprefix("by the prompt: right with ").split(", ")
    assert swapped.reason == f"by the prompt: right with {large}, {small}"
    assert entry.choose((*MODELS, "other"), (0, 1, 2), HARD, 3) is None
    assert entry.choose(MODELS, (0, 1, 2), "", 9) is None


def _bench(model: EntryModel) -> CascadeBench:
    bench = CascadeBench(70.0, 70.0, 0.0, entry="learnt")
    bench.actor.state.entries["casc"] = LearntEntry(model, MODELS)
    return bench


@pytest.mark.parametrize(("prompt", "first"), [(EASY, "small"), (HARD, "large"), ("", "small")])
def test_a_request_enters_where_its_prompt_belongs(model: EntryModel, prompt: str, first: str) -> None:
    bench = _bench(model)
    bench.ask(prompt_head=prompt)
    assert bench.actor.state.parents["r"].attempt.model == first


def test_a_higher_tier_answers_where_the_one_that_was_chosen_fails(model: EntryModel) -> None:
    bench = _bench(model)
    bench.ask(prompt_head=EASY, stream=True)
    parent = bench.actor.state.parents["r"]
    assert (parent.attempt.model, parent.last) == ("small", 0)
    assert parent.attempt.streams
    for _ in range(130):
        bench.lose("w-small")
    assert parent.attempt.model in ("middle", "large")


def test_an_answer_of_the_last_tier_that_is_chosen_is_delivered_whatever_it_scores(model: EntryModel) -> None:
    bench = _bench(model)
    bench.ask(prompt_head=EASY)
    bench.answer("no", logprob(20.0))
    report = bench.report()
    assert (report.model, report.reason) == ("small", "last_tier")


def test_a_file_of_other_models_or_of_none_is_refused(model: EntryModel, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in MODELS]
    for folder in folders:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(folder.name.encode() * 10)
    path = tmp_path / "entry.json"
    write_entry(path, msgspec.structs.replace(model.file, fingerprints=fingerprints(folders)))
    assert read_entry(path, folders=folders).file.value == 50.0
    config = CascadeConfig(
        name="c", tiers=[TierConfig(model=name) for name in MODELS], entry="learnt", entry_file=str(path)
    )
    models = [ModelConfig(name=name, path=str(folder)) for name, folder in zip(MODELS, folders, strict=True)]
    assert read_learnt_entry(config, models).choose(MODELS, (0, 1, 2), EASY, 3) is not None
    with pytest.raises(EntryUnreadable, match="not to the weights of middle, small, large"):
        read_entry(path, folders=[folders[1], folders[0], folders[2]])
    path.write_text("{")
    with pytest.raises(EntryUnreadable, match=r"entry\.json"):
        read_entry(path)
    with pytest.raises(OSError, match="missing"):
        read_learnt_entry(msgspec.structs.replace(config, entry_file=str(tmp_path / "missing")), models)
    with pytest.raises(ValueError, match="with their costs"):
        LearntEntry(EntryModel(msgspec.structs.replace(model.file, costs=())), MODELS)
