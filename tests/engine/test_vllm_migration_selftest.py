"""An engine tests itself before it moves anything, and says why it will not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from millrace.actor.engine import KvDenied, KvLeaseTaken, LeaseInEngine
from millrace.actor.errors import EngineStartFailed
from millrace.contracts.kv import KvRefusal
from millrace.contracts.worker import Sampling

from services.worker.config import MigrationConfig
from services.worker.vllm_engine.engine import VllmEngine
from tests.engine.bench_engine import BenchEngine, config
from tests.engine.moving import ask, until_tokens
from tests.testbed import tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.build(tmp_path_factory.mktemp("selftest"))


def test_an_engine_that_moves_a_sequence_to_itself_rightly_offers_its_kv(model: Path) -> None:
    engine = BenchEngine(config(model, migration=MigrationConfig(self_test=True)))
    try:
        assert engine.info.kv is not None, engine.info.kv_refusal
        assert engine.events == [], "nobody hears of the test"
        engine.run([7, 8, 9], Sampling(max_tokens=2))
        engine.until(engine.idle)
    finally:
        engine.stop()


def test_an_engine_whose_self_test_gives_other_tokens_moves_nothing(model: Path) -> None:
    broken = {"scheduler_cls": "tests.engine.broken_scheduler.SwappingScheduler"}
    engine = BenchEngine(config(model, migration=MigrationConfig(self_test=True), engine_args=broken))
    try:
        assert engine.info.kv is None
        assert "tokens differ" in engine.info.kv_refusal
        said = ask(engine, LeaseInEngine(migration="m", sequence="s", from_block=0))
        assert isinstance(said, KvDenied)
        assert said.reason is KvRefusal.UNKNOWN_SEQUENCE
        name = engine.add([7, 8, 9], Sampling(max_tokens=100, ignore_eos=True))
        until_tokens(engine, name, 2)
        leased = ask(engine, LeaseInEngine(migration="n", sequence=name, from_block=0))
        assert isinstance(leased, KvLeaseTaken)
        assert leased.blocks == [], "it can be computed anew elsewhere, and nobody reads its KV"
        engine.finish(name)
        engine.until(engine.idle)
    finally:
        engine.stop()


def test_an_engine_that_fails_while_it_tests_itself_does_not_start(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(_: VllmEngine) -> None:
        raise ValueError("no such snapshot")

    monkeypatch.setattr(VllmEngine, "_new_snapshot", unreadable)
    engine = VllmEngine(config(model, migration=MigrationConfig(self_test=True)))

    async def started() -> None:
        try:
            await engine.start(lambda event: None)
        finally:
            await engine.stop()

    with pytest.raises(EngineStartFailed, match="no such snapshot"):
        asyncio.run(started())


def _vllm_config(**fields: Any) -> Any:
    parallel = SimpleNamespace(
        pipeline_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1
    )
    defaults: dict[str, Any] = {
        "additional_config": {"millrace_kv_settings": "{}"},
        "speculative_config": None,
        "kv_transfer_config": None,
        "parallel_config": parallel,
    }
    return SimpleNamespace(**{**defaults, **fields})


@pytest.mark.parametrize(
    ("fields", "groups", "reason"),
    [
        ({}, 1, ""),
        ({"additional_config": {}}, 1, "migration is off"),
        ({"speculative_config": SimpleNamespace(method="medusa")}, 1, "drafts tokens with medusa"),
        ({"speculative_config": SimpleNamespace(method="eagle")}, 1, ""),
        ({"speculative_config": SimpleNamespace(method="ngram")}, 1, ""),
        ({"speculative_config": SimpleNamespace(method="eagle3")}, 1, ""),
        ({"speculative_config": SimpleNamespace(method="mtp")}, 1, ""),
        ({"speculative_config": SimpleNamespace(method="draft_model")}, 1, ""),
        ({"kv_transfer_config": object()}, 1, "connector"),
        ({}, 2, ""),
        ({}, 0, "no KV"),
    ],
)
def test_what_cannot_be_moved_is_said_with_its_reason(fields: dict[str, Any], groups: int, reason: str) -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from services.worker.vllm_engine.kv_mover import unmovable

    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
    kv_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)] * groups)
    said = unmovable(_vllm_config(**fields), kv_config)
    assert reason in said
    assert bool(said) == bool(reason)


def test_an_engine_moves_nothing_where_vllm_would_leave_a_group_behind() -> None:
    """HiSparse: part of the KV lies in a pool of its own in the host's memory."""
    import torch
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MLAAttentionSpec

    from services.worker.vllm_engine.kv_mover import unmovable

    spec = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32)
    groups = [KVCacheGroupSpec([str(moves)], spec, enable_kv_transfer=moves) for moves in (True, False)]
    assert "of some layers is never transferred" in unmovable(_vllm_config(), SimpleNamespace(kv_cache_groups=groups))
    assert not unmovable(_vllm_config(), SimpleNamespace(kv_cache_groups=groups[:1]))


def test_groups_that_nothing_here_knows_are_named() -> None:
    import torch
    from vllm.v1.kv_cache_interface import CrossAttentionSpec

    from services.worker.vllm_engine.kv_mover import unmovable

    spec = CrossAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
    kv_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    assert unmovable(_vllm_config(), kv_config) == "its layers keep CrossAttentionSpec"
