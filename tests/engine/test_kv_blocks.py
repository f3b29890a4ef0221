"""KV in an engine's memory: its layout in blocks, its bytes on a device, and checksums between steps."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from millrace.contracts.kv import UNSUMMED, KvPlane, KvRank
from millrace.kvcopy.checksum import BlockChecksums

from services.worker.vllm_engine.kv_memory import KvAllocation, KvMemory, on_device
from services.worker.vllm_engine.kv_ranks import BlockSampler, Ranks, Summing
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


def test_checksums_by_way_of_the_host_are_those_of_the_host() -> None:
    data = np.random.default_rng(5).integers(0, 256, 4096, dtype=np.uint8)
    planes = [KvPlane(offset=0, stride=256, bytes=256), KvPlane(offset=2048, stride=256, bytes=200)]
    memory = KvMemory(
        address=0, size=4096, device=0, shared=None, tensor=torch.from_numpy(data.copy()).view(torch.int8)
    )
    expected = BlockChecksums(data, KvRank(planes=planes, region_bytes=4096)).of([3, 0, 5])
    assert memory.checksums(planes, [3, 0, 5]) == expected
    assert memory.checksums(planes, []) == []


def test_layers_that_are_views_of_one_storage_are_one_memory() -> None:
    storage = torch.arange(128, dtype=torch.float32)
    memory = on_device(storage.as_strided((4, 8), (16, 1), storage_offset=32))
    assert (memory.address, memory.size) == (storage.data_ptr(), 512)
    assert torch.equal(memory.tensor.view(torch.float32), storage)


def test_a_placement_takes_one_allocation_of_bytes_and_no_other() -> None:
    with KvAllocation() as placement:
        other = torch.zeros(8, dtype=torch.float32)
        taken = torch.zeros(5000, dtype=torch.int8)
        second = torch.zeros(8, dtype=torch.int8)
    assert taken.data_ptr() == placement.region.address
    assert taken.numel() == 5000
    taken[7] = 9
    assert placement.region.view[7] == 9
    assert other.sum() == second.sum() == 0
    placement.region.close()


class TwoRanks:
    """Their sums are the block ids, and those times ten."""

    def __init__(self) -> None:
        self.asked: list[list[list[int]]] = []

    def checksums(self, rows: Sequence[list[int]]) -> list[list[int]]:
        self.asked.append(list(rows))
        return [[block for (block,) in rows], [10 * block for (block,) in rows]]


def summing(ranks: TwoRanks, blocks: list[int], wanted: list[bool]) -> Summing:
    return Summing(cast(Ranks, ranks), [[block] for block in blocks], row_bytes=100, wanted=wanted)


def test_a_share_of_the_bytes_is_summed_at_a_time_and_at_least_a_block() -> None:
    ranks = TwoRanks()
    work = summing(ranks, [5, 6, 7], [True] * 3)
    assert [work.advance(200), work.advance(1)] == [False, True]
    assert ranks.asked == [[[5], [6]], [[7]]]
    assert work.sums == [[5, 6, 7], [50, 60, 70]]


def test_blocks_outside_the_sample_are_not_read_and_say_so() -> None:
    ranks = TwoRanks()
    work = summing(ranks, [5, 6, 7], [False, True, False])
    assert work.advance(1000)
    assert ranks.asked == [[[6]]]
    assert work.sums == [[UNSUMMED, 6, UNSUMMED], [UNSUMMED, 60, UNSUMMED]]


@pytest.mark.parametrize("wanted", [[], [False, False]])
def test_where_no_block_is_wanted_nobody_is_asked(wanted: list[bool]) -> None:
    ranks = TwoRanks()
    work = summing(ranks, [5, 6], wanted)
    assert work.advance(1000)
    assert (work.sums, ranks.asked) == ([], [])


@pytest.mark.parametrize(("share", "taken"), [(0.0, 0), (1 / 16, 2), (0.25, 8), (1.0, 32)])
def test_a_sample_takes_its_share_however_few_blocks_come_at_a_time(share: float, taken: int) -> None:
    sample: Any = BlockSampler(share)
    assert sum(sum(sample.take(count)) for count in (1, 2, 3, 4, 5, 6, 7, 4)) == taken
