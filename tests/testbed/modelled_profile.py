"""A modelled engine that is profiled: what a profile finds out about it is known, so it tests the profile."""

from __future__ import annotations

import random

from millrace.actor.engine import EngineSequence
from millrace.contracts.worker import Sampling
from millrace.enginemodel.engine import ModelledEngine
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_time_models import StepTimeModel
from millrace.profiling.records import Profiled, Round, RoundRecord, StepRecord

#: Ids of prompts: any will do.
IDS = 200


class ModelledProfile:
    """Implements ProfilePort in virtual time; ``noise``: standard deviation of a step's time as a share of it."""

    def __init__(
        self, name: str, step_time: StepTimeModel, parameters: EngineParameters, *, noise: float = 0.0, seed: int = 0
    ) -> None:
        self._name = name
        self._model = step_time
        self._parameters = parameters
        self.noise = noise
        self._rng = random.Random(seed)

    def profiled(self) -> Profiled:
        return Profiled(
            model=f"modelled, {self._name}", hardware="none", engine="modelled", parameters=self._parameters
        )

    def run(self, load: Round) -> RoundRecord:
        engine = ModelledEngine(self._parameters, self._model)
        steps: list[StepRecord] = []
        added: list[int] = []
        while len(added) < len(load.sequences) or engine.scheduler.has_work():
            while len(added) < len(load.sequences) and load.due(
                len(added), steps=len(steps), running=len(engine.scheduler.running) + len(engine.scheduler.waiting)
            ):
                refusal = engine.add(_sequence(load, len(added)))
                assert refusal is None, refusal
                added.append(len(steps))
            steps.append(self._step(engine))
        return RoundRecord(round=load, steps=steps, added=added)

    def _step(self, engine: ModelledEngine) -> StepRecord:
        batch = engine.schedule(0)
        names = tuple(int(sequence.sequence) for sequence in batch.sequences)
        composition = batch.composition(with_longest=True)
        engine.complete_step(0, with_snapshot=False)
        took = engine.cost.duration_fs(composition) / 1e6 * max(0.1, self._rng.gauss(1.0, self.noise))
        return StepRecord(batch=composition, sequences=names, wall_ns=round(took), cpu_ns=round(took))

    def close(self) -> None:
        """Nothing to end."""


def _sequence(load: Round, index: int) -> EngineSequence:
    planned = load.sequences[index]
    rng = random.Random(f"{load.name} {index}")
    return EngineSequence(
        sequence=str(index),
        prompt_token_ids=[rng.randrange(IDS) for _ in range(planned.prompt_tokens)],
        sampling=Sampling(max_tokens=planned.output_tokens, ignore_eos=True),
    )
