"""The Engine port on real vLLM: its tokens, refusals, cancels and snapshots."""

import asyncio
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from millrace.actor.engine import EngineEvent, EngineFailed, EngineObserved, EngineSequence
from millrace.contracts.worker import Sampling, StructuredOutput
from vllm.v1.engine.exceptions import EngineDeadError

from services.worker.vllm_engine import engine as vllm_engine
from services.worker.vllm_engine import snapshot_buffer
from services.worker.vllm_engine.process import ENGINE_NICE
from tests.engine.bench_engine import BenchEngine, config, reference
from tests.testbed import tiny_llama
from tests.unit.worker_rig import snapshot

PROMPT = [7, 11, 13, 17, 19, 23, 29, 31]
LONG = [index % 250 + 1 for index in range(300)]
SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"boolean"}},"required":["a","b"]}'

#: Prompt and fields of sampling, which vLLM calls the same.
CASES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "greedy": (PROMPT, {"max_tokens": 40, "temperature": 0.0}),
    "long_prompt": (LONG, {"max_tokens": 20, "temperature": 0.0}),
    "logprobs": (PROMPT, {"max_tokens": 12, "temperature": 0.0, "logprobs": 3}),
    "allowed": (PROMPT, {"max_tokens": 12, "temperature": 0.0, "allowed_token_ids": [20, 21, 22]}),
    "prompt_logprobs": (LONG, {"max_tokens": 2, "temperature": 0.0, "prompt_logprobs": 2}),  # in three chunks
    "penalties": (
        PROMPT,
        {
            "max_tokens": 40,
            "temperature": 0.0,
            "frequency_penalty": 1.2,
            "presence_penalty": 0.5,
            "repetition_penalty": 1.3,
        },
    ),
    "seed": (PROMPT, {"max_tokens": 40, "seed": 5}),
    "nucleus": (PROMPT, {"max_tokens": 40, "seed": 5, "temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01}),
    "stop_and_bias": (
        PROMPT,
        {"max_tokens": 60, "min_tokens": 8, "seed": 2, "logit_bias": {"99": 6.0}, "stop_token_ids": [99]},
    ),
    "json_schema": (PROMPT, {"max_tokens": 60, "temperature": 0.0, "structured_outputs": {"json": SCHEMA}}),
}


def sampling_of(fields: dict[str, Any]) -> Sampling:
    """The same as a worker is told it."""
    here = {name: value for name, value in fields.items() if name != "structured_outputs"}
    if "logit_bias" in fields:
        here["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
    if "structured_outputs" in fields:
        here["structured"] = StructuredOutput(json_schema=fields["structured_outputs"]["json"])
    return Sampling(**here)


@pytest.fixture(scope="module")
def answers(model: Path) -> dict[str, tuple[list[int], str, Any]]:
    calls = [(prompt, {"detokenize": False, **fields}) for prompt, fields in CASES.values()]
    return dict(zip(CASES, reference(model, calls), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_vllms_own_generate(
    engine: BenchEngine, answers: dict[str, tuple[list[int], str, Any]], name: str
) -> None:
    prompt, fields = CASES[name]
    tokens, finish, logprobs = answers[name]
    here = engine.run(prompt, sampling_of(fields))
    assert (here.tokens, str(here.finish)) == (tokens, finish)
    if logprobs is not None:
        told = here.first.prompt_logprobs or [] if name == "prompt_logprobs" else here.logprobs
        for entry, expected in zip(told, logprobs, strict=True):
            assert len(entry.token_ids) == fields[name] + 1
            for token, value in zip(entry.token_ids, entry.logprobs, strict=True):
                assert value == pytest.approx(expected[str(token)], abs=1e-4)


def test_a_prompts_logprobs_are_told_once(engine: BenchEngine) -> None:
    sampling = Sampling(max_tokens=3, temperature=0.0, prompt_logprobs=2)
    begun = engine.run(PROMPT, sampling)
    (continued,) = engine.finish(engine.add(PROMPT, sampling, begun.tokens[:1]))
    assert begun.first.prompt_logprobs is not None
    assert continued.first.prompt_logprobs is None


def test_bad_words_are_not_decoded_and_salts_keep_prefixes_apart(engine: BenchEngine) -> None:
    free = engine.run(LONG, Sampling(max_tokens=8, temperature=0.0))
    held = engine.run(LONG, Sampling(max_tokens=8, temperature=0.0, bad_words=[[free.tokens[0]], free.tokens[1:3]]))
    assert free.tokens[0] not in held.tokens
    salted = [engine.run(LONG, Sampling(max_tokens=1, cache_salt=salt)) for salt in ("", "a", "a", "b")]
    cached = [decoded.first.cached_tokens for decoded in salted]
    assert cached[1] == cached[3] == 0
    assert cached[0] == cached[2] != 0


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
    {"logit_bias": {99999: 1.0}},
    {"logit_bias": dict.fromkeys(range(tiny_llama.VOCABULARY), -math.inf)},
    {"stop_token_ids": [2**40]},
    {"structured": StructuredOutput()},
    {"structured": StructuredOutput(json_schema="{nonsense")},
    {"structured": StructuredOutput(choice=[""])},
    {"structured": StructuredOutput(regex="(a|b){1,5000}(c|d){1,5000}")},
    {"structured": StructuredOutput(grammar="root ::= root")},
    {"structured": StructuredOutput(json_schema='{"$ref":"#"}')},
]


def test_no_value_at_the_edge_kills_the_engine(engine: BenchEngine) -> None:
    names = [engine.add(PROMPT, Sampling(**{"max_tokens": 8, **fields})) for fields in EDGES]

    def answered(name: str) -> bool:
        decoded = engine.decoded.get(name)
        return name in engine.rejected or (decoded is not None and decoded.finish is not None)

    engine.until(lambda: bool(engine.failures) or all(answered(name) for name in names))
    assert not engine.failures
    assert "out of vocabulary" in engine.rejection(engine.add([-3], Sampling(max_tokens=3)))
    assert engine.run(PROMPT, Sampling(max_tokens=3)).finish is not None


def test_a_sequence_may_come_back_under_its_name_while_its_abort_is_under_way(engine: BenchEngine) -> None:
    greedy = Sampling(max_tokens=30, temperature=0.0)
    expected = engine.run(PROMPT, greedy).tokens
    sequence = EngineSequence(sequence="again.0", prompt_token_ids=PROMPT, sampling=greedy)

    async def replace() -> None:
        for _ in range(5):
            engine.engine.add(sequence)
            engine.engine.cancel(["again.0"])
        engine.engine.add(sequence)

    engine.loop.run_until_complete(replace())
    assert engine.finish("again.0")[0].tokens == expected


def test_an_idle_engine_says_nothing(engine: BenchEngine) -> None:
    engine.run(PROMPT, Sampling(max_tokens=2))
    engine.until(engine.idle)
    engine.events.clear()
    engine.loop.run_until_complete(asyncio.sleep(0.3))
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


def test_threads_that_carry_messages_do_not_wait_for_the_one_that_computes(engine: BenchEngine) -> None:
    """They are as nice as whoever started the engine, and on any of its cores; the computing one yields to them."""
    process, here = engine.info.engine_pid, os.getpriority(os.PRIO_PROCESS, 0)
    threads = {int(task.name): (task / "comm").read_text() for task in Path(f"/proc/{process}/task").iterdir()}
    carriers = [thread for thread, name in threads.items() if name.startswith("ZMQ")]
    assert carriers
    assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in carriers} == {here}
    assert all(os.sched_getaffinity(thread) == os.sched_getaffinity(0) for thread in carriers)
    assert os.getpriority(os.PRIO_PROCESS, process) == max(here, ENGINE_NICE)
    assert os.sched_getaffinity(process) == {min(os.sched_getaffinity(0))}
    assert os.getsid(process) == process


def test_torch_s_ranks_meet_in_a_file_that_is_removed(engine: BenchEngine) -> None:
    files = list(Path(f"/proc/{engine.info.engine_pid}/fd").iterdir())
    (met,) = [file for file in files if "vllm_dist_" in os.readlink(file)]
    assert os.readlink(met).endswith(" (deleted)")
    assert met.stat().st_size
