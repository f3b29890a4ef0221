"""Families of models in their smallest: what vLLM chooses for each is what a worker starts it with."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from millrace.actor.engine import EndLeaseInEngine, FreezeInEngine, LeaseInEngine, SequenceStopped
from millrace.actor.errors import EngineStartFailed
from millrace.contracts.worker import Sampling
from vllm.model_executor.models import registry

from services.worker.config import MigrationConfig
from services.worker.vllm_engine.startup import checked_config, engine_args
from tests.engine.bench_engine import BenchEngine, config
from tests.engine.moving import ask, prompt_of, tell, until_tokens
from tests.testbed import moving_families, tiny_families, tiny_llama

PLAIN = Sampling(max_tokens=16, temperature=0.0, ignore_eos=True)


def start(folder: Path, **fields: Any) -> BenchEngine:
    return BenchEngine(config(folder, load_format="dummy", max_num_batched_tokens=0, **fields))


def test_a_mamba_model_starts_without_the_prefix_cache_that_it_cannot_have(tmp_path: Path) -> None:
    engine = start(tiny_families.build(tmp_path, "mamba2"))
    try:
        assert not engine.info.prefix_caching
        assert engine.info.max_model_len > 0
        assert len(engine.run(list(range(40)), PLAIN).tokens) == 16
    finally:
        engine.stop()


def test_a_hybrid_model_takes_a_prompt_of_several_blocks_on_a_cpu(tmp_path: Path) -> None:
    """Plain vLLM's engine dies of it where it caches prefixes, as it would choose."""
    engine = start(moving_families.build(tmp_path, moving_families.FAMILIES["granite4-hybrid"]))
    try:
        assert len(engine.run(prompt_of(100), PLAIN).tokens) == PLAIN.max_tokens
    finally:
        engine.stop()


def test_a_configuration_is_valid_again_for_the_text_part_of_a_model(tmp_path: Path) -> None:
    """As vLLM does for models that also see, once per part."""
    whole = checked_config(engine_args(config(tiny_llama.build(tmp_path))))
    part = whole.with_hf_config(whole.model_config.hf_config, architectures=["LlamaForCausalLM"])
    assert part.structured_outputs_config.disable_any_whitespace
    assert part.cache_config.block_size == 32


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


def test_a_sequence_that_is_to_be_computed_elsewhere_stands_still_and_goes_on_here_or_anew(tmp_path: Path) -> None:
    """In an engine whose KV cannot move."""
    engine = start(tiny_llama.build(tmp_path / "llama"), migration=MigrationConfig(enabled=False))
    assert engine.info.kv_refusal == "migration is off"
    sampling, prompt = Sampling(max_tokens=200, temperature=0.0, ignore_eos=True), prompt_of(40)
    try:
        expected = engine.run(prompt, sampling).tokens
        for moved in (False, True):
            name = engine.add(prompt, sampling)
            until_tokens(engine, name, 30)
            ask(engine, LeaseInEngine(migration=name, sequence=name, from_block=0))
            stopped = ask(engine, FreezeInEngine(migration=name, sequence=name, from_block=0))
            assert isinstance(stopped, SequenceStopped)
            known = stopped.output_token_ids
            engine.run(prompt_of(8), PLAIN)  # meanwhile
            assert engine.decoded[name].tokens == known == expected[: len(known)]
            assert len(known) < len(expected)
            tell(engine, EndLeaseInEngine(migration=name, moved=moved))
            if moved:
                assert known + engine.run(prompt, sampling, known).tokens == expected
                assert engine.decoded[name].tokens == known
            else:
                assert engine.finish(name)[0].tokens == expected
    finally:
        engine.stop()
