"""Carries out the tagger's own effects: training in a child process, outcomes and models in files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec
from millrace.actor.child_process import run_in_child
from millrace.actor.effects import Effect
from millrace.actor.runtime_nats import ActorHandle
from millrace.contracts.message import Body
from millrace.lengths.child import TrainingJob
from millrace.lengths.files import OutcomesUnreadable, OutcomeWriter, load_warm, model_token, read_models, write_model
from millrace.lengths.samples import LengthSample
from millrace.lengths.training import TrainingResult

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


class TaggerShell:
    """The shell of one tagger process. Its methods run on the event loop; training runs beside it."""

    def __init__(self, config: TaggerConfig) -> None:
        self._name = config.name
        self._learning = config.learning
        self._root = Path(config.learning.directory)
        self._writers: dict[str, OutcomeWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._handle: ActorHandle | None = None

    def handlers(self) -> Mapping[type[Effect], Callable[[Any], None]]:
        return {
            LoadLengths: self._on_load,
            TrainLengths: self._on_train,
            KeepModel: self._on_keep_model,
            KeepOutcomes: self._on_keep_outcomes,
        }

    def attach(self, handle: ActorHandle) -> None:
        self._handle = handle

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _tell(self, body: Body) -> None:
        assert self._handle is not None
        self._handle.deliver(body)

    def _on_load(self, effect: LoadLengths) -> None:
        self._tell(load(self._name, self._learning))

    def _on_train(self, effect: TrainLengths) -> None:
        self._spawn(self._train(effect))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _train(self, effect: TrainLengths) -> None:
        job = TrainingJob(model=effect.model, samples=effect.samples, incumbent=effect.incumbent, at_ns=effect.at_ns)
        try:
            result = await asyncio.wait_for(run_child(job), TRAINING_LIMIT_S)
            self._tell(LengthsTrained(model=effect.model, result=result))
        except (OSError, TimeoutError, msgspec.DecodeError, ChildProcessError) as error:
            self._tell(TrainingFailed(model=effect.model, detail=f"training: {error!r}"))

    def _on_keep_model(self, effect: KeepModel) -> None:
        try:
            write_model(self._root, effect.model, effect.payload)
        except OSError as error:
            self._tell(KeepingFailed(model=effect.model, detail=str(error)))

    def _on_keep_outcomes(self, effect: KeepOutcomes) -> None:
        try:
            writer = self._writers.get(effect.model)
            if writer is None:
                writer = self._writers[effect.model] = OutcomeWriter(self._root, effect.model, self._name)
            writer.append(effect.samples)
        except (OSError, OutcomesUnreadable) as error:
            self._tell(KeepingFailed(model=effect.model, detail=str(error)))


async def run_child(job: TrainingJob) -> TrainingResult:
    """Train in a child process.

    Raises:
        ChildProcessError: it failed; the text is the end of its complaint.
    """
    output = await run_in_child("millrace.lengths.child", msgspec.msgpack.encode(job))
    return msgspec.msgpack.decode(output, type=TrainingResult)
