"""The modelled scheduler under random load, and what it refuses; its rules stand against vLLM's in
test_enginemodel_fidelity.
"""

import random
from typing import Any

import pytest
from millrace.actor.engine import EngineSequence, EngineStepped
from millrace.contracts.ingress import FinishReason
from millrace.contracts.worker import Sampling, StructuredOutput
from millrace.enginemodel.engine import ModelledEngine
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_time_models import LinearStepTime

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


def batch(model: ModelledEngine) -> list[tuple[str, int]]:
    """Runs one step; returns who computed how many tokens."""
    scheduled = model.schedule(0)
    shares = [(each.sequence, count) for each, count in zip(scheduled.sequences, scheduled.counts, strict=True)]
    if shares:
        model.complete_step(STEP_NS)
    model.check_invariants()
    return shares


def run_out(model: ModelledEngine) -> dict[str, list[int]]:
    """Runs until nothing is left; returns the tokens of each sequence."""
    tokens: dict[str, list[int]] = {}
    now_ns = 0
    while (done := model.step(now_ns)) is not None:
        stepped, duration_ns = done
        now_ns += duration_ns
        for output in stepped.outputs:
            tokens.setdefault(output.sequence, []).extend(output.token_ids)
        assert now_ns < 10_000 * STEP_NS, "it does not end"
    model.check_invariants()
    return tokens


def test_without_chunks_a_prompt_waits_for_a_step_that_holds_it_and_holds_up_the_queue() -> None:
    model = engine(chunked_prefill=False, token_budget=128)
    add(model, sequence("a", 100), sequence("b", 40), sequence("c", 2))
    assert batch(model) == [("a", 100)]
    assert batch(model) == [("a", 1), ("b", 40), ("c", 2)]


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


@pytest.mark.parametrize("mode", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(12))
def test_under_random_load_every_sequence_gets_the_tokens_it_gets_alone(seed: int, mode: bool) -> None:
    rng = random.Random(seed)
    changes: dict[str, Any] = {
        "async_scheduling": mode,
        "blocks_total": rng.choice([32, 40, 200]),
        "max_sequences": rng.choice([2, 5, 16]),
        "token_budget": rng.choice([16, 32, 100]),
        "long_prefill_token_threshold": rng.choice([0, 9]),
        "prefix_caching": rng.random() < 0.7,
        "watermark": rng.choice([0.0, 0.05]),
        "reserve_full_prompt": rng.random() < 0.7,
    }
    model = engine(**changes)
    sources = [
        sequence(f"{index}", rng.randint(1, 90), output=rng.randint(1, 60), arrival_ns=index) for index in range(25)
    ]
    tokens: dict[str, list[int]] = {source.sequence: [] for source in sources}
    finished: dict[str, FinishReason] = {}
    pending, now_ns, cancelled = list(sources), 0, set()
    while pending or model.scheduler.has_work():
        while pending and rng.random() < 0.3:
            add(model, pending.pop(0))
        if rng.random() < 0.02 and model.scheduler.running:
            gone = rng.choice(model.scheduler.running).sequence
            cancelled.add(gone)
            model.cancel([gone])
        for output in _next(model, now_ns).outputs:
            tokens[output.sequence] += output.token_ids
            if output.finish:
                finished[output.sequence] = output.finish
        now_ns += STEP_NS
        model.check_invariants()
        assert now_ns < 20_000 * STEP_NS, "it does not end"
    assert set(finished) | cancelled == set(tokens)
    assert model.scheduler.pool.free == model.parameters.blocks_total
    for source in sources:
        if source.sequence not in cancelled:
            alone = engine()
            add(alone, source)
            assert tokens[source.sequence] == run_out(alone)[source.sequence]


def _next(model: ModelledEngine, now_ns: int) -> EngineStepped:
    if model.begin_step(now_ns) is None:
        return EngineStepped(step=0, at_ns=now_ns, outputs=[])
    return model.complete_step(now_ns)


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
