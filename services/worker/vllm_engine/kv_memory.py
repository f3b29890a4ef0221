"""The memory that one rank's KV cache lies in, on the host or on a GPU, and the checksums of its blocks.

On a CPU all of it is put into one memfd, so that other engines on the host can map it. vLLM allocates the cache of all
layers as one ``torch.zeros`` of bytes; ``KvAllocation`` is a context in which that one call gives memory of our own.
On a GPU it stays where vLLM allocated it. That half was read and never run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from millrace.contracts.kv import KvPlane, KvRank
from millrace.kvcopy.checksum import BlockChecksums
from millrace.kvcopy.memory import SharedRegion
from torch.overrides import TorchFunctionMode


class KvAllocation(TorchFunctionMode):
    """Puts the one big allocation made inside it into a memfd."""

    def __init__(self) -> None:
        super().__init__()
        self.region: SharedRegion | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Takes ``torch.zeros`` of bytes; all else passes."""
        kwargs = kwargs or {}
        if func is not torch.zeros or kwargs.get("dtype") is not torch.int8 or self.region is not None:
            return func(*args, **kwargs)
        size = int(args[0])
        self.region = SharedRegion(size)
        return torch.frombuffer(self.region.view, dtype=torch.int8, count=size)


@dataclass(frozen=True, slots=True)
class KvMemory:
    """One allocation.

    Attributes:
        address: In this process, or on the GPU.
        device: Number of the GPU, -1 for the host.
        shared: On the host: what other processes can map.
        tensor: All of it, bytes.
    """

    address: int
    size: int
    device: int
    shared: SharedRegion | None
    tensor: torch.Tensor

    def checksums(self, planes: list[KvPlane], blocks: Sequence[int]) -> list[int]:
        """CRC-32C of blocks that lie on a GPU: they are brought to the host for it, in one copy."""
        rows = [
            torch.cat([self.tensor.narrow(0, plane.offset + block * plane.stride, plane.bytes) for plane in planes])
            for block in blocks
        ]
        if not rows:
            return []
        width = rows[0].numel()
        staged = torch.cat(rows).cpu().view(torch.uint8).numpy()
        rank = KvRank(planes=[KvPlane(offset=0, stride=width, bytes=width)], region_bytes=len(staged))
        return BlockChecksums(staged, rank).of(range(len(rows)))


def on_host(region: SharedRegion) -> KvMemory:
    """That of a CPU engine."""
    tensor = torch.frombuffer(region.view, dtype=torch.int8)
    return KvMemory(address=region.address, size=region.size, device=-1, shared=region, tensor=tensor)


def on_device(kv_cache: torch.Tensor) -> KvMemory:
    """That of a GPU engine: all layers' caches are views of one storage (*read*)."""
    storage = kv_cache.untyped_storage()
    tensor = torch.empty(0, dtype=torch.int8, device=kv_cache.device).set_(storage)
    index = kv_cache.device.index or 0
    return KvMemory(address=storage.data_ptr(), size=storage.nbytes(), device=index, shared=None, tensor=tensor)
