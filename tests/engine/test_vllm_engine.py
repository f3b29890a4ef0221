"""The Engine port on real vLLM: its tokens, refusals, cancels and snapshots."""

import asyncio
import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from millrace.actor.engine import EngineEvent, EngineFailed, EngineObserved, EngineStepped
from millrace.contracts.ingress import FinishReason
from millrace.contracts.status import SequenceState
from millrace.contracts.worker import Sampling, StructuredOutput
from vllm.v1.engine.exceptions import EngineDeadError

from services.worker.vllm_engine import engine as vllm_engine
from services.worker.vllm_engine import snapshot_buffer
from services.worker.vllm_engine.process import ENGINE_NICE
from tests.engine.bench_engine import BenchEngine, config, reference
from tests.testbed import tiny_llama
from tests.unit.worker_rig import snapshot

#: Where the engine computes.
CORE = min(os.sched_getaffinity(0))
PROMPT = [7, 11, 13, 17, 19, 23, 29, 31]
LONG = [index % 250 + 1 for index in range(300)]
SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"boolean"}},"required":["a","b"]}'

#: Name, prompt, sampling here, the same for vLLM.
CASES: list[tuple[str, list[int], Sampling, dict[str, Any]]] = [
    ("greedy", PROMPT, Sampling(max_tokens=40, temperature=0.0), {"max_tokens": 40, "temperature": 0.0}),
    ("long_prompt", LONG, Sampling(max_tokens=20, temperature=0.0), {"max_tokens": 20, "temperature": 0.0}),
    (
        "logprobs",
        PROMPT,
        Sampling(max_tokens=12, temperature=0.0, logprobs=3),
        {"max_tokens": 12, "temperature": 0.0, "logprobs": 3},
    ),
    (
        "allowed",
        PROMPT,
        Sampling(max_tokens=12, temperature=0.0, allowed_token_ids=[20, 21, 22]),
        {"max_tokens": 12, "temperature": 0.0, "allowed_token_ids": [20, 21, 22]},
    ),
    (
        "prompt_logprobs",  # of a prompt in three chunks
        LONG,
        Sampling(max_tokens=2, temperature=0.0, prompt_logprobs=2),
        {"max_tokens": 2, "temperature": 0.0, "prompt_logprobs": 2},
    ),
    (
        "penalties",
        PROMPT,
        Sampling(max_tokens=40, temperature=0.0, frequency_penalty=1.2, presence_penalty=0.5, repetition_penalty=1.3),
        {
            "max_tokens": 40,
            "temperature": 0.0,
            "frequency_penalty": 1.2,
            "presence_penalty": 0.5,
            "repetition_penalty": 1.3,
        },
    ),
    ("seed", PROMPT, Sampling(max_tokens=40, seed=5), {"max_tokens": 40, "seed": 5}),
    (
        "nucleus",
        PROMPT,
        Sampling(max_tokens=40, seed=5, temperature=0.8, top_p=0.9, top_k=40, min_p=0.01),
        {"max_tokens": 40, "seed": 5, "temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    ),
    (
        "stop_and_bias",
        PROMPT,
        Sampling(max_tokens=60, min_tokens=8, seed=2, logit_bias={99: 6.0}, stop_token_ids=[99]),
        {"max_tokens": 60, "min_tokens": 8, "seed": 2, "logit_bias": {"99": 6.0}, "stop_token_ids": [99]},
    ),
    (
        "json_schema",
        PROMPT,
        Sampling(max_tokens=60, temperature=0.0, structured=StructuredOutput(json_schema=SCHEMA)),
        {"max_tokens": 60, "temperature": 0.0, "structured_outputs": {"json": SCHEMA}},
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.build(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[BenchEngine]:
    engine = BenchEngine(config(model, engine_cores=[CORE]))
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def answers(model: Path) -> dict[str, tuple[list[int], str, Any]]:
    calls = [(prompt, {"detokenize": False, **fields}) for _, prompt, _, fields in CASES]
    return dict(zip([case[0] for case in CASES], reference(model, calls), strict=True))


@pytest.mark.parametrize("name", [case[0] for case in CASES])
def test_tokens_are_those_of_vllms_own_generate(
    engine: BenchEngine, answers: dict[str, tuple[list[int], str, Any]], name: str
) -> None:
    _, prompt, sampling, _ = next(case for case in CASES if case[0] == name)
    tokens, finish, logprobs = answers[name]
    here = engine.run(prompt, sampling)
    assert here.tokens == tokens
    assert str(here.finish) == finish
    if logprobs is not None:
        told = here.logprobs if sampling.prompt_logprobs is None else here.first.prompt_logprobs or []
        for entry, expected in zip(told, logprobs, strict=True):
            assert len(entry.token_ids) == (sampling.logprobs or sampling.prompt_logprobs or 0) + 1
            for token, value in zip(entry.token_ids, entry.logprobs, strict=True):
                assert value == pytest.approx(expected[str(token)], abs=1e-4)


def test_a_prompts_logprobs_are_told_once(engine: BenchEngine) -> None:
    sampling = Sampling(max_tokens=3, temperature=0.0, prompt_logprobs=2)
    begun = engine.run(PROMPT, sampling)
    (continued,) = engine.finish(engine.add(PROMPT, sampling, begun.tokens[:1]))
    assert begun.first is not None
    assert begun.first.prompt_logprobs is not None
    assert continued.first.prompt_logprobs is None


def test_bad_words_are_not_decoded_and_salts_keep_prefixes_apart(engine: BenchEngine) -> None:
    free = engine.run(LONG, Sampling(max_tokens=8, temperature=0.0))
    assert free.first is not None
    held = engine.run(LONG, Sampling(max_tokens=8, temperature=0.0, bad_words=[[free.tokens[0]], free.tokens[1:3]]))
    assert free.tokens[0] not in held.tokens
    cached = []
    for salt in ("", "a", "a", "b"):
        decoded = engine.run(LONG, Sampling(max_tokens=1, temperature=0.0, cache_salt=salt))
        cached.append(decoded.first.cached_tokens)
    assert cached[1] == cached[3] == 0
    assert cached[0] == cached[2] != 0


def test_sequences_of_one_batch_get_what_they_get_alone(engine: BenchEngine) -> None:
    samplings = [Sampling(max_tokens=30, temperature=0.0), Sampling(max_tokens=30, seed=9, logprobs=2)]
    alone = [engine.run(PROMPT, sampling) for sampling in samplings]
    together = engine.finish(*[engine.add(PROMPT, sampling) for sampling in samplings * 3])
    for one, other in zip(itertools.cycle(alone), together, strict=False):
        assert other.tokens == one.tokens
    assert [len(entry.token_ids) for entry in together[1].logprobs] == [3] * len(together[1].tokens)
    assert together[0].logprobs == []


def test_seeded_sequences_with_prompts_in_chunks_harm_nobody(engine: BenchEngine) -> None:
    alone = engine.run(LONG, Sampling(max_tokens=10, seed=4))
    together = engine.finish(*[engine.add(LONG, Sampling(max_tokens=10, seed=4)) for _ in range(3)])
    assert [decoded.tokens for decoded in together] == [alone.tokens] * 3
    assert not engine.failures()


@pytest.mark.parametrize(
    ("prompt", "sampling", "sentence"),
    [
        (PROMPT, Sampling(max_tokens=5, top_p=7.0), "top_p must be in (0, 1]"),
        (PROMPT, Sampling(max_tokens=0), "max_tokens must be at least 1"),
        (PROMPT, Sampling(max_tokens=5, temperature=-1.0), "temperature must be non-negative"),
        (PROMPT, Sampling(max_tokens=5, logprobs=500), "logprobs"),
        (PROMPT, Sampling(max_tokens=5, logit_bias={99999: 1.0}), "99999"),
        ([99999], Sampling(max_tokens=5), "out of vocabulary"),
        ([-3], Sampling(max_tokens=5), "out of vocabulary"),
        ([1] * 2000, Sampling(max_tokens=5), "1024"),
        (PROMPT, Sampling(max_tokens=5, structured=StructuredOutput(json_schema="{nonsense")), "json"),
    ],
)
def test_bad_parameters_are_refused_with_vllms_sentence(
    engine: BenchEngine, prompt: list[int], sampling: Sampling, sentence: str
) -> None:
    name = engine.add(prompt, sampling)
    assert sentence.lower() in engine.rejection(name).lower()
    assert not engine.failures()


#: Values that pass or fail vLLM's checks at their edge. One of them that killed the engine would kill, by way of
#: continuation, every engine of the cluster.
EDGES: list[dict[str, Any]] = [
    {"seed": 2**64 - 1},
    {"seed": -(2**63)},
    {"temperature": math.nan},
    {"temperature": 1e-30},
    {"top_p": math.nan},
    {"top_k": 2**62},
    {"frequency_penalty": math.inf},
    {"repetition_penalty": 0.0},
    {"max_tokens": 2**62, "stop_token_ids": list(range(200))},
    {"min_tokens": 50},
    {"logprobs": -1},
    {"logprobs": 20},
    {"logit_bias": {5: math.nan}},
    {"logit_bias": dict.fromkeys(range(tiny_llama.VOCABULARY), -math.inf)},
    {"stop_token_ids": [2**40]},
    {"structured": StructuredOutput()},
    {"structured": StructuredOutput(choice=[""])},
    {"structured": StructuredOutput(regex="(a|b){1,5000}(c|d){1,5000}")},
    {"structured": StructuredOutput(grammar="root ::= root")},
    {"structured": StructuredOutput(json_schema='{"$ref":"#"}')},
]


def test_no_value_at_the_edge_kills_the_engine(engine: BenchEngine) -> None:
    names = [engine.add(PROMPT, Sampling(**{"max_tokens": 8, **fields})) for fields in EDGES]

    def answered(name: str) -> bool:
        decoded = engine.decoded.get(name)
        return (decoded is not None and decoded.finish is not None) or engine.rejected(name)

    engine.until(lambda: bool(engine.failures()) or all(answered(name) for name in names))
    assert not engine.failures()
    assert engine.run(PROMPT, Sampling(max_tokens=3)).finish is not None


def test_a_cancelled_sequence_is_silent_and_its_blocks_come_back(engine: BenchEngine) -> None:
    names = [engine.add(LONG, Sampling(max_tokens=600, ignore_eos=True)) for _ in range(3)]
    engine.until(lambda: all(len(engine.decoded.get(name, _NONE).tokens) > 3 for name in names))
    assert not engine.idle()
    engine.cancel(*names)
    steps = _steps(engine)
    heard = [len(engine.decoded[name].tokens) for name in names]
    engine.until(engine.idle)
    assert [len(engine.decoded[name].tokens) for name in names] == heard
    # One step may have ended unheard, one more was under way when the abort came.
    assert _steps(engine) - steps <= 2


def test_a_sequence_may_come_back_under_its_name_while_its_abort_is_under_way(engine: BenchEngine) -> None:
    from millrace.actor.engine import EngineSequence

    expected = engine.run(PROMPT, Sampling(max_tokens=30, temperature=0.0)).tokens
    sequence = EngineSequence(
        sequence="again.0", prompt_token_ids=PROMPT, sampling=Sampling(max_tokens=30, temperature=0.0)
    )

    async def replace() -> None:
        for _ in range(5):
            engine.engine.add(sequence)
            engine.engine.cancel(["again.0"])
        engine.engine.add(sequence)

    engine.loop.run_until_complete(replace())
    assert engine.finish("again.0")[0].tokens == expected


def test_the_snapshot_says_what_the_scheduler_knows(engine: BenchEngine) -> None:
    engine.until(engine.idle)
    engine.events.clear()
    names = [engine.add([1 + index] * 40, Sampling(max_tokens=12, ignore_eos=True)) for index in range(18)]
    engine.finish(*names)
    engine.until(engine.idle)
    steps = [event for event in engine.events if isinstance(event, EngineStepped)]
    outputs = dict.fromkeys(names, 0)
    seen_waiting = False
    for event in steps:
        for output in event.outputs:
            outputs[output.sequence] += len(output.token_ids)
        if event.snapshot is None or event.snapshot.step != event.step:
            continue
        snapshot = event.snapshot
        assert len(snapshot.running) <= 16
        seen_waiting = seen_waiting or bool(snapshot.waiting)
        assert all(entry.state is SequenceState.WAITING for entry in snapshot.waiting)
        for entry in snapshot.running:
            assert entry.output_tokens == outputs[entry.sequence]
            assert (entry.prompt_tokens, entry.max_tokens) == (40, 12)
            assert entry.blocks == -(-entry.computed_tokens // 32)
        held = sum(entry.blocks for entry in snapshot.running)
        assert snapshot.blocks_free == snapshot.blocks_total - held, "no block is shared in this test"
        assert snapshot.batch.decodes + snapshot.batch.prefills <= 16
    assert seen_waiting
    numbers = [event.step for event in steps]
    assert numbers == sorted(set(numbers)), "one message per step"
    prefilled = sum(e.snapshot.batch.prefill_tokens for e in steps if e.snapshot and e.snapshot.step == e.step)
    assert prefilled <= 18 * 40


def test_an_idle_engine_says_nothing(engine: BenchEngine) -> None:
    engine.run(PROMPT, Sampling(max_tokens=2))
    engine.until(engine.idle)
    engine.events.clear()
    engine.loop.run_until_complete(_pause(0.3))
    assert [e for e in engine.events if not isinstance(e, EngineObserved)] == []


def test_a_snapshot_that_nobody_had_read_when_the_engine_died_is_not_told_afterwards(model: Path) -> None:
    path = snapshot_buffer.create()
    writer = snapshot_buffer.SnapshotWriter(path)
    engine = vllm_engine.VllmEngine(config(model))
    events: list[EngineEvent] = []
    dead = SimpleNamespace(pid=1, exitcode=-9)
    core = SimpleNamespace(resources=SimpleNamespace(engine_manager=SimpleNamespace(processes=[dead])))
    engine.__dict__.update(
        _snapshots=snapshot_buffer.SnapshotReader(path), _llm=SimpleNamespace(engine_core=core), _listener=events.append
    )
    path.unlink()

    async def die() -> None:
        engine._spawn(engine._poll())
        engine._spawn(_broken())
        await asyncio.sleep(0)
        writer.write(msgspec.msgpack.encode(msgspec.structs.astuple(snapshot(1))))
        await asyncio.sleep(3 * vllm_engine.IDLE_POLL_S)

    asyncio.run(die())
    engine._snapshots.close()
    assert [type(event) for event in events] == [EngineFailed]


async def _broken() -> None:
    raise EngineDeadError


async def _pause(seconds: float) -> None:
    await asyncio.sleep(seconds)


def _steps(engine: BenchEngine) -> int:
    return max((event.step for event in engine.events if isinstance(event, EngineStepped)), default=0)


class _Empty:
    tokens: list[int] = []
    finish: FinishReason | None = None


_NONE = _Empty()


def test_threads_that_carry_messages_do_not_wait_for_the_one_that_computes(engine: BenchEngine) -> None:
    """They are as nice as whoever started the engine, and on any of its cores; the computing one yields to them."""
    process, here = engine.info.engine_pid, os.getpriority(os.PRIO_PROCESS, 0)
    threads = {int(task.name): (task / "comm").read_text() for task in Path(f"/proc/{process}/task").iterdir()}
    carriers = [thread for thread, name in threads.items() if name.startswith("ZMQ")]
    assert carriers
    assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in carriers} == {here}
    assert all(os.sched_getaffinity(thread) == os.sched_getaffinity(0) for thread in carriers)
    assert os.getpriority(os.PRIO_PROCESS, process) == max(here, ENGINE_NICE)
    assert os.sched_getaffinity(process) == {CORE}
    assert os.getsid(process) == process
