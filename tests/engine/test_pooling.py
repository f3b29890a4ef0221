"""Models that pool, on real vLLM: what a worker's engine gives is what plain vLLM gives."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from millrace.contracts.ingress import FinishReason
from millrace.contracts.worker import PIECE_BYTES, Pooled, Pooling, Sampling

from services.worker.vllm_engine.pooling import pieces
from tests.engine.bench_engine import BenchEngine, config, reference
from tests.engine.moving import prompt_of
from tests.testbed import tiny_families

CLASSIFIER = {
    "num_attention_heads": 2,
    "architectures": ["BertForSequenceClassification"],
    "id2label": {"0": "relevant"},
}
#: Family, what of its configuration is changed, what is asked for, and where a second text begins.
MODELS: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("qwen3-embedding", {"head_dim": 32}, {"task": "embed", "use_activation": False}, {}),
    ("bert", CLASSIFIER, {"task": "classify"}, {"second_from": 5}),
]


def value_of(parts: list[bytes] | None) -> Any:
    assert parts is not None
    pooled = msgspec.msgpack.decode(b"".join(parts), type=Pooled)
    return np.frombuffer(pooled.values, "<f4").reshape(pooled.shape)


@pytest.mark.parametrize(("family", "changes", "asked", "second"), MODELS)
def test_a_batch_gives_what_plain_vllm_gives(
    tmp_path: Path, family: str, changes: dict[str, Any], asked: dict[str, Any], second: dict[str, int]
) -> None:
    folder = tiny_families.build(tmp_path, family, **changes)
    pooling = Pooling(**asked, **second)
    types = {"extra_kwargs": {"compressed_token_type_ids": second["second_from"]}} if second else {}
    prompts = [prompt_of(length) for length in (8, 40, 100)]
    calls = [(prompt, asked | types) for prompt in prompts]
    plain = reference(folder, calls, load_format="dummy", max_num_batched_tokens=1024)
    with BenchEngine(config(folder, load_format="dummy", max_num_batched_tokens=0)) as engine:
        assert (engine.info.task, engine.info.kv) == (pooling.task, None)
        assert engine.info.blocks_total > 0
        names = [engine.add(prompt, Sampling(max_tokens=1, pooling=pooling)) for prompt in prompts]
        for name, (expected, *_), decoded in zip(names, plain, engine.finish(*names), strict=True):
            assert (decoded.tokens, decoded.finish) == ([0], FinishReason.STOP)
            first = engine.decoded[name].first
            np.testing.assert_allclose(value_of(first.pooled), np.array(expected), rtol=1e-4, atol=1e-5)
        engine.until(engine.idle)
        rejected = engine.add(prompts[0], Sampling(max_tokens=1, pooling=Pooling(task="token_classify", dimensions=3)))
        assert "token_classify" in engine.rejection(rejected)
        assert "generation" in engine.rejection(engine.add(prompts[0], Sampling(max_tokens=4)))


def test_a_large_output_is_cut_into_pieces() -> None:
    import torch

    values = torch.arange(PIECE_BYTES // 2, dtype=torch.float32).reshape(-1, 2)
    cut = pieces(values)
    assert [len(part) <= PIECE_BYTES for part in cut] == [True] * 3
    np.testing.assert_array_equal(value_of(cut), values.numpy())
