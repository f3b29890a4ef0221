"""Rows of blocks are read and summed by the planes of the group that each column is of."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from millrace.contracts.kv import NO_BLOCK, CopierKind, KvPlane

from services.worker.vllm_engine import kv_copiers
from services.worker.vllm_engine.kv_memory import SharedRegion, on_host
from services.worker.vllm_engine.kv_region import KvRegion, planes

PAGE, SIZE = 256, 8 * 512
#: Both lie in the same tensors: one has two layers, the other one, whose pages are padded.
WIDE = [KvPlane(0, PAGE, PAGE), KvPlane(SIZE // 2, PAGE, PAGE)]
NARROW = [KvPlane(0, PAGE, PAGE)]


def region(path: Path, seed: int) -> tuple[KvRegion, np.ndarray]:
    shared = SharedRegion(SIZE)
    content = np.asarray(shared.view)
    content[:] = np.random.default_rng(seed).integers(0, 256, SIZE, dtype=np.uint8)
    memory = on_host(shared)
    made = KvRegion(memory, [WIDE, NARROW, NARROW], kv_copiers.build(memory, path, [CopierKind.SHARED_MEMORY]))
    made.offer()
    return made, content


def test_a_row_is_read_into_a_row_and_has_its_checksum_then(tmp_path: Path) -> None:
    source, given = region(tmp_path / "a", 1)
    target, got = region(tmp_path / "b", 2)
    before = got.copy()
    sources, targets = [[1, 2, NO_BLOCK], [3, NO_BLOCK, 4]], [[5, 6, NO_BLOCK], [7, NO_BLOCK, 1]]
    size, _ = target.begin(
        "m", kind=CopierKind.SHARED_MEMORY, peer=source.offer(), source_rows=sources, target_rows=targets
    )
    while not target.advance("m", 1 << 20):
        pass
    assert size == 6 * PAGE
    assert target.checksums(targets) == source.checksums(sources)
    pairs = [(1, 5, WIDE), (3, 7, WIDE), (2, 6, NARROW), (4, 1, NARROW)]
    for here, there, group in pairs:
        for plane in group:
            before[plane.offset + there * PAGE :][:PAGE] = given[plane.offset + here * PAGE :][:PAGE]
    assert np.array_equal(got, before), "nothing else was written"
    source.close()
    target.close()


@pytest.mark.parametrize("at", [PAGE, SIZE // 2 + PAGE, 2 * PAGE])
def test_a_byte_of_any_block_of_a_row_changes_its_checksum(tmp_path: Path, at: int) -> None:
    made, content = region(tmp_path / "a", 1)
    rows = [[1, 2, NO_BLOCK], [3, NO_BLOCK, 4]]
    before = made.checksums(rows)
    content[at] ^= 1
    after = made.checksums(rows)
    assert after[0] != before[0]
    assert after[1] == before[1]
    made.close()


def test_scales_of_quantised_kv_are_part_of_its_pages() -> None:
    """Those of each token and head, which vLLM writes behind its values; those of a tensor are weights."""
    import torch
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheTensor, KVQuantMode

    heads, width, tokens, blocks = 2, 32, 16, 3
    spec = TritonAttentionBackend.customize_spec(
        FullAttentionSpec(
            block_size=tokens,
            num_kv_heads=heads,
            head_size=width,
            dtype=torch.int8,
            kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD,
        )
    )
    page = heads * tokens * 2 * (width + 4)
    tensor = KVCacheTensor(size=page * blocks, layers=["a"], layer_stride=page * blocks, block_stride=page)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["a"])
    config = SimpleNamespace(kv_cache_tensors=[tensor], kv_cache_groups=[group])
    assert planes(config, "LBHNC") == [[KvPlane(0, page, page)]]
