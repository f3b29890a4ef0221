"""Checksums of KV that lies on a GPU are those of the same bytes on the host."""

import numpy as np
import torch
from millrace.contracts.kv import KvPlane, KvRank
from millrace.kvcopy.checksum import BlockChecksums

from services.worker.vllm_engine.kv_memory import KvAllocation, KvMemory, on_device


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
