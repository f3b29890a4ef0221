"""An engine tests itself before it moves anything, and says why it will not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from millrace.actor.engine import EndLeaseInEngine, EngineObserved, FreezeInEngine, LeaseInEngine
from millrace.actor.errors import EngineStartFailed
from millrace.contracts.kv import KvRefusal
from millrace.contracts.worker import Sampling
from vllm.v1.kv_cache_interface import CrossAttentionSpec, FullAttentionSpec, KVCacheGroupSpec, MLAAttentionSpec

from services.worker.config import MigrationConfig
from services.worker.vllm_engine.engine import VllmEngine
from services.worker.vllm_engine.kv_mover import unmovable
from tests.engine.bench_engine import BenchEngine, config
from tests.engine.moving import ask, prompt_of, tell, until_tokens


def test_an_engine_whose_self_test_gives_other_tokens_moves_nothing(model: Path) -> None:
    """A sequence can be computed anew elsewhere, or goes on here."""
    broken = {"scheduler_cls": "tests.engine.broken_scheduler.SwappingScheduler"}
    with BenchEngine(config(model, migration=MigrationConfig(self_test=True), engine_args=broken)) as engine:
        assert all(isinstance(event, EngineObserved) for event in engine.events), "the test is its own"
        assert engine.info.kv is None
        assert "tokens differ" in engine.info.kv_refusal
        unknown = LeaseInEngine(migration="m", sequence="s", from_block=0)
        assert ask(engine, unknown).reason is KvRefusal.UNKNOWN_SEQUENCE
        prompt, sampling = prompt_of(40), Sampling(max_tokens=200, temperature=0.0, ignore_eos=True)
        expected = engine.run(prompt, sampling).tokens
        for moved in (False, True):
            name = engine.add(prompt, sampling)
            until_tokens(engine, name, 30)
            leased = ask(engine, LeaseInEngine(migration=name, sequence=name, from_block=0))
            assert leased.blocks == [], "its KV is never read"
            known = ask(engine, FreezeInEngine(migration=name, sequence=name, from_block=0)).output_token_ids
            engine.run(prompt_of(8), Sampling(max_tokens=16))  # meanwhile
            assert engine.decoded[name].tokens == known == expected[: len(known)] != expected
            tell(engine, EndLeaseInEngine(migration=name, moved=moved))
            if moved:
                assert known + engine.run(prompt, sampling, known).tokens == expected
                assert engine.decoded[name].tokens == known
            else:
                assert engine.finish(name)[0].tokens == expected
        engine.until(engine.idle)


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


SPEC = {"block_size": 32, "head_size": 32, "dtype": torch.float32}


@pytest.mark.parametrize(
    ("fields", "groups", "reason"),
    [
        ({"additional_config": {}}, 1, "migration is off"),
        ({"speculative_config": SimpleNamespace(method="medusa")}, 1, "drafts tokens with medusa"),
        ({"speculative_config": SimpleNamespace(method="eagle3")}, 1, ""),
        ({"kv_transfer_config": object()}, 1, "connector"),
        ({}, 2, ""),
        ({}, 0, "no KV"),
    ],
)
def test_what_cannot_be_moved_is_said_with_its_reason(fields: dict[str, Any], groups: int, reason: str) -> None:
    spec = FullAttentionSpec(num_kv_heads=2, **SPEC)
    kv_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)] * groups)
    said = unmovable(_vllm_config(**fields), kv_config)
    assert reason in said
    assert bool(said) == bool(reason)


def test_an_engine_moves_nothing_where_vllm_would_leave_a_group_behind() -> None:
    """HiSparse: part of the KV lies in a pool of its own in the host's memory."""
    spec = MLAAttentionSpec(num_kv_heads=1, **SPEC)
    groups = [KVCacheGroupSpec([str(moves)], spec, enable_kv_transfer=moves) for moves in (True, False)]
    assert "of some layers is never transferred" in unmovable(_vllm_config(), SimpleNamespace(kv_cache_groups=groups))


def test_groups_that_nothing_here_knows_are_named() -> None:
    groups = [SimpleNamespace(kv_cache_spec=CrossAttentionSpec(num_kv_heads=2, **SPEC))]
    assert unmovable(_vllm_config(), SimpleNamespace(kv_cache_groups=groups)) == "its layers keep CrossAttentionSpec"
