"""Families of models in their smallest: what vLLM chooses for each is what a worker starts it with."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from millrace.actor.errors import EngineStartFailed
from millrace.contracts.worker import Sampling

from services.worker.vllm_engine.startup import checked_config, engine_args
from tests.engine.bench_engine import BenchEngine, config
from tests.testbed import tiny_families, tiny_llama

PLAIN = Sampling(max_tokens=16, temperature=0.0, ignore_eos=True)


def start(folder: Path, **fields: object) -> BenchEngine:
    return BenchEngine(config(folder, load_format="dummy", max_num_batched_tokens=0, **fields))


def test_a_mamba_model_starts_without_the_prefix_cache_that_it_cannot_have(tmp_path: Path) -> None:
    engine = start(tiny_families.build(tmp_path, "mamba2"))
    try:
        assert not engine.info.prefix_caching
        assert engine.info.max_model_len > 0
        assert len(engine.run(list(range(40)), PLAIN).tokens) == 16
    finally:
        engine.stop()


@pytest.mark.parametrize("family", ["bert", "qwen3-embedding"])
def test_a_model_that_pools_does_not_start(tmp_path: Path, family: str) -> None:
    with pytest.raises(EngineStartFailed, match=r"pools .* only text generation is served"):
        start(tiny_families.build(tmp_path, family))


def test_a_configuration_is_valid_again_for_the_text_part_of_a_model(tmp_path: Path) -> None:
    """As vLLM does for models that also see, once per part."""
    whole = checked_config(engine_args(config(tiny_llama.build(tmp_path))))
    part = whole.with_hf_config(whole.model_config.hf_config, architectures=["LlamaForCausalLM"])
    assert part.structured_outputs_config.disable_any_whitespace
    assert part.cache_config.block_size == 32


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed")
def test_a_model_whose_module_cannot_be_imported_is_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(EngineStartFailed) as refused:
        start(tiny_families.build(tmp_path, "qwen3.5"))
    assert "\n" not in str(refused.value)
    assert "failed to be inspected" in str(refused.value)
