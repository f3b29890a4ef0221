"""Families of models in their smallest: what vLLM chooses for each is what a worker starts it with."""

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from millrace.actor.errors import EngineStartFailed
from millrace.contracts.worker import Sampling
from vllm.model_executor.models import registry

from services.worker.vllm_engine import startup
from services.worker.vllm_engine.startup import checked_config, engine_args
from tests.engine.bench_engine import BenchEngine, config
from tests.engine.moving import prompt_of
from tests.testbed import moving_families, tiny_families

PLAIN = Sampling(max_tokens=16, temperature=0.0, ignore_eos=True)


def start(folder: Path, **fields: Any) -> BenchEngine:
    return BenchEngine(config(folder, load_format="dummy", max_num_batched_tokens=0, **fields))


def test_a_mamba_model_has_no_prefix_cache(tmp_path: Path) -> None:
    folder = moving_families.build(tmp_path, moving_families.FAMILIES["mamba2"])
    chosen = checked_config(engine_args(config(folder)))
    assert not chosen.cache_config.enable_prefix_caching


def test_a_hybrid_model_takes_a_prompt_of_several_blocks_on_a_cpu(tmp_path: Path) -> None:
    """Plain vLLM's engine dies of it where it caches prefixes, as it would choose."""
    with start(moving_families.build(tmp_path, moving_families.FAMILIES["granite4-hybrid"])) as engine:
        assert len(engine.run(prompt_of(100), PLAIN).tokens) == PLAIN.max_tokens


def test_a_configuration_is_valid_again_for_the_text_part_of_a_model(model: Path) -> None:
    """As vLLM does for models that also see, once per part."""
    whole = checked_config(engine_args(config(model)))
    part = whole.with_hf_config(whole.model_config.hf_config, architectures=["LlamaForCausalLM"])
    assert part.structured_outputs_config.disable_any_whitespace
    assert part.cache_config.block_size == 32


def test_a_processor_without_instructions_for_bfloat16_computes_small_models_in_float32(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)

    def chosen(capability: str, dtype: str = "auto") -> str:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        return engine_args(config(tmp_path, dtype=dtype)).dtype

    assert [chosen("AVX2"), chosen("AVX2", "bfloat16"), chosen("AVX512")] == ["float32", "bfloat16", "auto"]
    monkeypatch.setattr(startup, "FLOAT32_WEIGHTS_MAX", 1)
    assert chosen("AVX2") == "auto"
    monkeypatch.undo()
    (tmp_path / "config.json").write_text('{"quantization_config": {}, "model_type": "llama"}')
    assert chosen("AVX2") == "auto"


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed")
def test_a_model_whose_module_cannot_be_imported_is_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))  # it may know the model from where it could be
    # Its process for this imports all of vLLM anew: ten seconds.
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())
    with pytest.raises(EngineStartFailed) as refused:
        start(tiny_families.build(tmp_path, "qwen3.5"))
    assert "\n" not in str(refused.value)
    assert "failed to be inspected" in str(refused.value)
