"""Engines that compile: the second start finds the first one's compile cache, tokens are the eager engine's, and a
sequence moves between a compiled and an eager engine.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from millrace.actor.engine import EndLeaseInEngine, LeaseInEngine
from millrace.contracts.worker import Sampling
from torch._inductor import cpp_builder
from vllm import envs
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from services.worker.vllm_engine import compiling, startup
from services.worker.vllm_engine.runner import ContinuingCPUModelRunner
from tests.engine.bench_engine import BenchEngine, config
from tests.engine.moving import Pair, ask, begin, settled, tell, until_tokens, whole

#: A path that stays: the cache knows a model by it.
MODEL = Path(__file__).resolve().parents[2] / "models" / "millrace-nano"
PROMPT = [6 + (index * 37) % 200 for index in range(150)]
GREEDY = Sampling(max_tokens=300, temperature=0.0, ignore_eos=True)
#: Blocks of 32 tokens that two ways to the same KV are compared by.
BLOCKS = 58
#: Output tokens that fill them, behind the prompt.
TOKENS = 1750
ENDLESS = Sampling(max_tokens=3500, temperature=1.0, seed=1, ignore_eos=True)
LOGPROBS = Sampling(max_tokens=5, temperature=0.0, ignore_eos=True, logprobs=3)


def artefacts() -> dict[Path, int]:
    """Compiled models on this machine, and their ages."""
    folder = Path(envs.VLLM_CACHE_ROOT, "torch_compile_cache", "torch_aot_compile")
    return {path: path.stat().st_mtime_ns for path in folder.glob("*/rank_0_0/model")}


def compiled(**fields: Any) -> BenchEngine:
    return BenchEngine(config(MODEL, enforce_eager=None, **fields))


@pytest.fixture(scope="module")
def engine() -> Iterator[BenchEngine]:
    with compiled() as engine:
        yield engine


def test_a_second_start_compiles_nothing(engine: BenchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it run the compiler to see whether a header is current."""
    monkeypatch.setattr(cpp_builder, "run_compile_cmd", None)
    before = artefacts()
    assert before
    with compiled():
        pass
    assert artefacts() == before


def test_the_warm_up_computes_a_piece_of_a_prompt_and_no_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    monkeypatch.setattr(CPUModelRunner, "profile_run", lambda self, _: computed.append(self.max_num_tokens))
    runner = object.__new__(ContinuingCPUModelRunner)
    runner.max_num_tokens, runner.scheduler_config = 2048, SimpleNamespace(long_prefill_token_threshold=256)
    runner.profile_run()
    assert (computed, runner.max_num_tokens) == ([256], 2048)


def test_tokens_are_the_eager_engines_and_a_move_changes_none(engine: BenchEngine) -> None:
    with BenchEngine(config(MODEL), "t") as eager:
        expected = eager.run(PROMPT, GREEDY).tokens
        assert engine.run(PROMPT, GREEDY).tokens == expected
        for pair in (Pair(engine, eager), Pair(eager, engine)):
            journey = begin(pair, PROMPT, GREEDY, at=30)
            journey.go()
            assert whole(journey).tokens == expected
            settled(pair)


def test_log_probabilities_compile_nothing_while_others_wait(engine: BenchEngine) -> None:
    running = engine.add(PROMPT, Sampling(max_tokens=400, temperature=0.0, ignore_eos=True))
    assert engine.run(PROMPT[:20], LOGPROBS).logprobs
    assert engine.decoded[running].finish is None, "meanwhile it made less than 400 tokens"
    engine.finish(running)


def _sums(engine: BenchEngine, name: str) -> list[int]:
    """Checksums of a running sequence's first blocks of KV."""
    said = ask(engine, LeaseInEngine(migration=name, sequence=name, from_block=0))
    tell(engine, EndLeaseInEngine(migration=name, moved=False))
    (sums,) = said.checksums
    assert len(sums) >= BLOCKS
    return list(sums[:BLOCKS])


def _agreeing(engine: BenchEngine, known: list[int], expected: list[int]) -> int:
    """Blocks of KV up to the first that decode steps fill otherwise than this engine does from their tokens."""
    name = engine.add(PROMPT, ENDLESS, known)
    until_tokens(engine, name, 1)
    same = [left == right for left, right in zip(expected, _sums(engine, name), strict=True)]
    engine.cancel(name)
    return same.index(False) if False in same else BLOCKS


def test_kv_computed_again_in_bf16_is_longer_that_of_the_decode_steps() -> None:
    """Tiles of a context end where the processor's caches and instructions have attention end them. The lengths do
    too: with caches of 512 KiB 1,650 tokens in vLLM's pieces, all of these in ours.
    """
    fields = {"dtype": "bfloat16", "enable_prefix_caching": False, "max_num_batched_tokens": 2048}
    with compiled(**fields, engine_args={"long_prefill_token_threshold": startup.PIECE_TOKENS}) as engine:
        first = engine.add(PROMPT, ENDLESS)
        until_tokens(engine, first, TOKENS)
        known, expected = engine.decoded[first].tokens[:TOKENS], _sums(engine, first)
        ours = _agreeing(engine, known, expected)  # beside the first one, then alone
        engine.cancel(first)
        engine.until(engine.idle)
        ours = min(ours, _agreeing(engine, known, expected))
    with compiled(**fields, engine_args={"long_prefill_token_threshold": 2048}) as engine:
        own = _agreeing(engine, known, expected)
    print(f"{own} and {ours} of {BLOCKS} blocks agree, in pieces of 2,048 and {startup.PIECE_TOKENS} tokens")
    if own == ours < 10:
        pytest.skip("this processor computes bf16 prompts with other instructions than decode steps")
    assert ours > own or ours == BLOCKS


@pytest.mark.parametrize(("name", "value"), [("TORCHDYNAMO_DISABLE", "1"), ("CXX", "/nowhere/g++"), ("PATH", "")])
def test_without_a_compiler_the_engine_is_eager_and_says_why(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(name, value)
    assert compiling.why_eager()
    assert startup.engine_args(config(MODEL, enforce_eager=None)).enforce_eager
    assert len(caplog.messages) == 1
    assert compiling.why_eager() in caplog.text
    startup.engine_args(config(MODEL, enforce_eager=True))
    assert len(caplog.messages) == 1, "asked for, so not worth a word"
