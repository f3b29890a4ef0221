"""Times, lengths and refusals of modelled engines; their rules stand against vLLM's in test_enginemodel_fidelity.py."""

import random
import statistics
from typing import Any

import pytest
from millrace.actor.engine import EngineSequence
from millrace.contracts.worker import Sampling, StructuredOutput
from millrace.enginemodel.engine import ModelledEngine
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_time_models import LinearStepTime
from millrace.enginemodel.tokens import OutputLengths, stream_key

STEP_NS = 1000


def engine(**changes: Any) -> ModelledEngine:
    parameters = EngineParameters(
        **{"max_model_len": 128, "block_size": 4, "blocks_total": 64, "max_sequences": 8, "token_budget": 32, **changes}
    )
    return ModelledEngine(parameters, LinearStepTime(fixed=STEP_NS))


def sequence(name: str, prompt: int, *, output: int = 4, seed: int = 0, **changes: Any) -> EngineSequence:
    rng = random.Random(f"{name} {seed}")
    return EngineSequence(
        sequence=name,
        prompt_token_ids=[rng.randrange(97, 123) for _ in range(prompt)],
        sampling=Sampling(max_tokens=output, ignore_eos=True),
        **changes,
    )


def add(model: ModelledEngine, *sequences: EngineSequence) -> None:
    for each in sequences:
        assert model.add(each) is None


def test_with_async_scheduling_two_steps_are_under_way_and_time_does_not_double() -> None:
    model = engine(async_scheduling=True)
    add(model, sequence("a", 5, output=3))
    ends: list[int] = []
    now_ns = 0
    while (left_ns := model.begin_step(now_ns)) is not None:
        now_ns += left_ns
        if model.complete_step(now_ns).outputs:
            ends.append(now_ns)
    assert ends == [STEP_NS, 2 * STEP_NS, 3 * STEP_NS]
    assert not model.scheduler.has_work()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"blocks_total": 31}, "blocks_total"),
        ({"chunked_prefill": False, "token_budget": 100}, "token_budget"),
        ({"watermark": 1.0}, "watermark"),
        ({"max_sequences": 0}, "max_sequences"),
    ],
)
def test_parameters_that_cannot_work_are_refused_by_name(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError) as refused:
        engine(**changes)
    assert word in str(refused.value)


def test_what_the_model_cannot_do_is_refused_not_ignored() -> None:
    model = engine()
    source = EngineSequence(
        sequence="a",
        prompt_token_ids=[97],
        sampling=Sampling(max_tokens=4, structured=StructuredOutput(json_object=True)),
    )
    assert "grammar" in (model.add(source) or "")
    add(model, sequence("b", 3))
    assert "already" in (model.add(sequence("b", 3)) or "")


def test_natural_lengths_have_the_mean_and_spread_asked_for() -> None:
    lengths = [OutputLengths(mean=200, sigma=0.8).length(stream_key([index], None)) for index in range(4000)]
    assert statistics.fmean(lengths) == pytest.approx(200, rel=0.06)
    assert statistics.median(lengths) == pytest.approx(200 * 2.718281828 ** (-(0.8**2) / 2), rel=0.06)
    assert min(lengths) >= 1
    assert {OutputLengths(mean=7, sigma=0).length(bytes([index])) for index in range(9)} == {7}
    assert OutputLengths(mean=500, sigma=0, length_max=40).length(b"key") == 40
