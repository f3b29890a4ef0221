"""The layout of the KV cache: a block as one piece where the attention backend can use that."""

from types import SimpleNamespace

import pytest
from millrace.contracts.kv import KvPlane

from services.worker.vllm_engine.kv_words import SETTINGS
from services.worker.vllm_engine.layout import BlockFirstMixin, block_first, merged


def test_block_first_is_preferred_where_the_backend_can_use_it_and_nothing_else_changes() -> None:
    assert block_first(["LBNHC", "LBHNC", "BLNHC", "BLHNC"]) == ["BLHNC", "LBNHC", "LBHNC", "BLNHC"]
    assert block_first(["LBHNC"]) == ["LBHNC"]


class _FakeWorker:
    def __init__(self, settings: dict[str, str]) -> None:
        self.vllm_config = SimpleNamespace(additional_config=settings)

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["LBHNC", "BLHNC"]


class _BlockFirstWorker(BlockFirstMixin, _FakeWorker):
    pass


def test_a_worker_whose_kv_may_not_move_keeps_its_backends_preference() -> None:
    assert _BlockFirstWorker({SETTINGS: "{}"}).get_supported_kv_cache_layouts() == ["BLHNC", "LBHNC"]
    assert _BlockFirstWorker({}).get_supported_kv_cache_layouts() == ["LBHNC", "BLHNC"]


@pytest.mark.parametrize(("layers", "taken"), [(4, 256), (3, 192)], ids=["whole", "with padding at its end"])
def test_layers_that_lie_side_by_side_in_a_block_are_one_plane(layers: int, taken: int) -> None:
    planes = [KvPlane(offset=index * 64, stride=256, bytes=64) for index in range(layers)]
    assert merged(planes) == [KvPlane(offset=0, stride=256, bytes=taken)]


@pytest.mark.parametrize("blocks", [1, 2, 100])
def test_layers_with_regions_of_their_own_stay_apart_however_few_the_blocks(blocks: int) -> None:
    layers = [KvPlane(offset=index * blocks * 64, stride=64, bytes=64) for index in range(4)]
    assert merged(layers) == layers
