"""A sequence of each family of models says what plain vLLM says, and moves there and back with its KV.

`./task test` runs those of ``SHORT``, `./task test:families` all. The table in docs/MIGRATION.md has a row for each.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from millrace.contracts.worker import Sampling

from services.worker.config import MigrationConfig
from tests.engine.bench_engine import BenchEngine, Decoded, config, reference
from tests.engine.moving import Pair, begin, prompt_of, recomputed, settled, until_tokens, whole
from tests.testbed import moving_families

pytestmark = pytest.mark.timeout(300)

SHORT = ("gemma3",)
CHOSEN = list(moving_families.FAMILIES) if os.environ.get("MILLRACE_FAMILIES") else list(SHORT)
#: Output tokens at which a sequence moves: before its window of 64 is full, across its end, long after it.
POINTS = (20, 60, 260)


@pytest.fixture(scope="module", params=CHOSEN)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, moving_families.build(tmp_path_factory.mktemp("family"), request.param)


@pytest.fixture(scope="module")
def engines(family: tuple[str, Path]) -> Iterator[Pair]:
    fields: dict[str, Any] = {"kv_bytes": 8 << 20, "migration": MigrationConfig(copy_bytes_per_step=64 << 10)}
    source = BenchEngine(config(family[1], **fields))
    target = BenchEngine(config(family[1], **fields, seed=99), "t")
    yield Pair(source, target)
    for engine in (source, target):
        engine.stop()


def _moved(pair: Pair, prompt: list[int], sampling: Sampling, at: int) -> Decoded:
    """The sequence as its client saw it: it moved at so many tokens, and back after some more."""
    there = begin(pair, prompt, sampling, at=at)
    there.block_tokens = there.endpoint().block_tokens
    there.go()
    assert there.stopped is not None
    before = there.stopped.output_token_ids
    until_tokens(pair.target, there.name, 30)
    back = begin(pair.turned(), prompt, sampling, at=0, before=before, name=there.name)
    back.block_tokens = there.block_tokens
    back.go()
    return whole(back)


@pytest.mark.parametrize("at", POINTS)
def test_a_sequence_goes_there_and_back_as_if_it_had_stayed(engines: Pair, at: int) -> None:
    assert engines.source.info.kv_refusal == ""
    sampling = Sampling(max_tokens=at + 1000, temperature=1.0, seed=at, ignore_eos=True)
    prompt = prompt_of(20, salt=at)
    expected = engines.source.run(prompt, sampling)
    since = len(engines.target.events)
    moved = _moved(engines, prompt, sampling, at)
    assert moved.tokens == expected.tokens
    assert not recomputed(engines.target, since), "nothing was computed again"
    settled(engines)


def test_text_is_what_plain_vllm_says(engines: Pair, family: tuple[str, Path]) -> None:
    sampling = Sampling(max_tokens=300, temperature=0.0, ignore_eos=True)
    fields = {"max_tokens": 300, "temperature": 0.0, "ignore_eos": True}
    prompts = [prompt_of(length, salt=length) for length in (9, 100)]
    told = [engines.source.run(prompt, sampling).tokens for prompt in prompts]
    # With its prefix cache plain vLLM's engine dies on a CPU of the hybrid family's second prompt.
    plain = reference(family[1], [(prompt, fields) for prompt in prompts], enable_prefix_caching=False)
    assert told == [tokens for tokens, _, _ in plain]
