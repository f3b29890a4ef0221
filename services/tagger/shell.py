"""Carries out the tagger's own effects: training in a child process, outcomes and models in files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from millrace.actor.child_process import run_in_child
from millrace.actor.effects import Effect
from millrace.actor.task_shell import TaskShell
from millrace.lengths.files import load_warm, model_token, outcome_writer, read_models, write_model
from millrace.lengths.frames import FileUnreadable, FrameWriter
from millrace.lengths.samples import LengthSample
from millrace.lengths.training import train_candidate

from services.tagger.config import LearningConfig, TaggerConfig
from services.tagger.effects import (
    KeepingFailed,
    KeepModel,
    KeepOutcomes,
    LengthsLoaded,
    LengthsTrained,
    LoadLengths,
    TrainingFailed,
    TrainLengths,
)
from services.tagger.state import SAMPLES_MAX

#: A training takes seconds; one that takes longer than this is killed.
TRAINING_LIMIT_S = 300.0


def load(name: str, learning: LearningConfig) -> LengthsLoaded:
    """Models and this tagger's outcomes from the configured folder, and the models that ship."""
    root = Path(learning.directory) if learning.directory else None
    models, problems = read_models(root, shipped=learning.pretrained)
    outcomes: dict[str, list[LengthSample]] = {}
    for folder in sorted(root.iterdir()) if root is not None and root.is_dir() else ():
        try:
            outcomes[model_token(folder)] = load_warm(folder, name, SAMPLES_MAX)
        except OSError as error:
            problems[str(folder)] = error.strerror or str(error)
    kept = {model: samples for model, samples in outcomes.items() if samples}
    return LengthsLoaded(models=models, outcomes=kept, problems=problems)


class TaggerShell(TaskShell):
    """The shell of one tagger process; training runs beside it."""

    def __init__(self, config: TaggerConfig) -> None:
        super().__init__()
        self._name = config.name
        self._learning = config.learning
        self._root = Path(config.learning.directory)
        self._writers: dict[str, FrameWriter] = {}

    def handlers(self) -> Mapping[type[Effect], Callable[[Any], None]]:
        return {
            LoadLengths: self._on_load,
            TrainLengths: lambda effect: self.spawn(self._train(effect)),
            KeepModel: self._on_keep_model,
            KeepOutcomes: self._on_keep_outcomes,
        }

    def _on_load(self, effect: LoadLengths) -> None:
        self.tell(load(self._name, self._learning))

    async def _train(self, effect: TrainLengths) -> None:
        model = effect.job.model
        try:
            result = await asyncio.wait_for(run_in_child(train_candidate, effect.job), TRAINING_LIMIT_S)
            self.tell(LengthsTrained(model=model, result=result))
        except (OSError, TimeoutError, msgspec.DecodeError, ChildProcessError) as error:
            self.tell(TrainingFailed(model=model, detail=f"training: {error!r}"))

    def _on_keep_model(self, effect: KeepModel) -> None:
        try:
            write_model(self._root, effect.model, effect.payload)
        except OSError as error:
            self.tell(KeepingFailed(model=effect.model, detail=str(error)))

    def _on_keep_outcomes(self, effect: KeepOutcomes) -> None:
        try:
            writer = self._writers.get(effect.model)
            if writer is None:
                writer = self._writers[effect.model] = outcome_writer(self._root, effect.model, self._name)
            writer.append(effect.samples)
        except (OSError, FileUnreadable) as error:
            self.tell(KeepingFailed(model=effect.model, detail=str(error)))
