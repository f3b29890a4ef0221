"""Calls of the engine core to each rank about its KV (``collective_rpc``), and the placement of that KV.

``attempt`` turns errors into values: (sentence, None), or ("", result).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.contracts.kv import CopierKind, KvRank

from services.worker.vllm_engine import kv_copiers, kv_words
from services.worker.vllm_engine.kv_memory import KvAllocation, KvMemory, on_device, on_host
from services.worker.vllm_engine.kv_region import KvRegion, Unplaceable, attempt, planes

if TYPE_CHECKING:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.cpu_worker import CPUWorker

_Runner: Any = CPUModelRunner if TYPE_CHECKING else object
_Worker: Any = CPUWorker if TYPE_CHECKING else object


class PlacedMixin(_Runner):
    """A model runner on a CPU whose KV cache lies in a memfd."""

    def initialize_kv_cache_tensors(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Allocates the cache there, where this engine may move KV."""
        self.millrace_placement = None
        if kv_words.SETTINGS not in self.vllm_config.additional_config:
            return super().initialize_kv_cache_tensors(kv_cache_config, *args, **kwargs)
        placement = KvAllocation()
        with placement:
            tensors = super().initialize_kv_cache_tensors(kv_cache_config, *args, **kwargs)
        self.millrace_placement = placement
        return tensors


class KvRankMixin(_Worker):
    """A worker that offers its KV and reads others'. The engine core asks for the offer before anything else."""

    _region: KvRegion | None = None
    distributed_init_method: str

    def init_device(self) -> None:
        """Prepares the device. vLLM leaves the file in which ranks meet: torch now finds it open, so it is removed."""
        elsewhere, _, path = self.distributed_init_method.partition("file://")
        if not elsewhere:
            self.distributed_init_method = f"file:///proc/self/fd/{os.open(path, os.O_CREAT | os.O_RDWR, 0o600)}"
        super().init_device()
        if not elsewhere:
            Path(path).unlink(missing_ok=True)

    def millrace_kv_offer(self, columns: list[int]) -> tuple[str, Any]:
        """The rank as an encoded KvRank, and its copiers. Args: columns: the group of each column of a row."""
        return attempt(lambda: self._offer(columns))

    def _offer(self, columns: list[int]) -> tuple[bytes, list[str]]:
        settings = kv_words.decode_settings(self.vllm_config.additional_config[kv_words.SETTINGS])
        by_group = planes(self.model_runner.kv_cache_config, self.cache_config.get_resolved_kv_cache_layout().name)
        memory, socket = self._memory(), Path(settings.socket.format(rank=self.rank))
        copiers = kv_copiers.build(memory, socket, settings.copiers)
        self._region = region = KvRegion(memory, [by_group[group] for group in columns], copiers)
        return kv_words.encode(region.offer()), [str(kind) for kind in region.kinds]

    def _memory(self) -> KvMemory:
        caches = self.model_runner.kv_caches
        if caches and caches[0].is_cuda:
            return on_device(caches[0])
        placement = getattr(self.model_runner, "millrace_placement", None)
        if placement is None or placement.region is None:
            raise Unplaceable("the KV cache was not allocated where other processes could read it")
        return on_host(placement.region)

    @property
    def _offered(self) -> KvRegion:
        assert self._region is not None, "millrace_kv_offer first"
        return self._region

    def _peer(self, peers: bytes) -> KvRank:
        """That of the same rank."""
        return kv_words.decode_ranks(peers)[self.rank]

    def millrace_kv_connect(self, kind: str, peers: bytes) -> tuple[str, Any]:
        """Opens the peer."""
        return attempt(lambda: self._offered.connect(CopierKind(kind), self._peer(peers)))

    def millrace_kv_checksums(self, rows: list[list[int]]) -> list[int]:
        """Checksum of each row, over this rank's planes."""
        return self._offered.checksums(rows)

    def millrace_kv_begin(
        self, key: str, kind: str, peers: bytes, source_rows: list[list[int]], target_rows: list[list[int]]
    ) -> tuple[str, Any]:
        """Starts a read from the peer: bytes and descriptors."""
        rows = {"source_rows": source_rows, "target_rows": target_rows}
        return attempt(lambda: self._offered.begin(key, kind=CopierKind(kind), peer=self._peer(peers), **rows))

    def millrace_kv_advance(self, key: str, bytes_max: int) -> tuple[str, Any]:
        """Whether a read is done."""
        return attempt(lambda: self._offered.advance(key, bytes_max))

    def millrace_kv_cancel(self, key: str) -> None:
        self._offered.cancel(key)

    def millrace_kv_forget(self, kind: str, peers: bytes) -> None:
        """Gives up the link to the peer."""
        self._offered.forget(CopierKind(kind), self._peer(peers))

    def shutdown(self) -> None:
        """Gives up the sockets besides what vLLM gives up."""
        if self._region is not None:
            self._region.close()
        super().shutdown()
