"""Calls of the engine core to each rank about its KV (``collective_rpc``), and the placement of that KV.

``attempt`` turns errors into values: (sentence, None), or ("", result).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.contracts.kv import CopierKind

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
    """A worker that offers its KV and reads others'."""

    _region: KvRegion | None = None

    def millrace_kv_offer(self) -> tuple[str, Any]:
        """The rank as an encoded KvRank, and its copiers."""
        return attempt(self._offer)

    def _offer(self) -> tuple[bytes, list[str]]:
        settings = kv_words.decode_settings(self.vllm_config.additional_config[kv_words.SETTINGS])
        if self._region is None:
            self._region = self._make_region(settings)
        rank = self._region.offer()
        return kv_words.encode(rank), [str(kind) for kind in self._region.kinds]

    def _make_region(self, settings: kv_words.KvSettings) -> KvRegion:
        layout = self.cache_config.get_resolved_kv_cache_layout().name
        kv_planes = planes(self.model_runner.kv_cache_config, layout)
        memory = self._memory()
        socket = Path(settings.socket.format(rank=self.rank))
        return KvRegion(memory, kv_planes, kv_copiers.build(memory, socket, settings.copiers))

    def _memory(self) -> KvMemory:
        caches = self.model_runner.kv_caches
        if caches and caches[0].is_cuda:
            return on_device(caches[0])
        placement = getattr(self.model_runner, "millrace_placement", None)
        if placement is None or placement.region is None:
            raise Unplaceable("the KV cache was not allocated where other processes could read it")
        return on_host(placement.region)

    def millrace_kv_connect(self, kind: str, peers: bytes) -> tuple[str, Any]:
        """Opens the peer of the same rank."""
        region = self._region
        assert region is not None
        return attempt(lambda: region.connect(CopierKind(kind), kv_words.decode_ranks(peers)[self.rank]))

    def millrace_kv_checksums(self, rows: list[list[int]], columns: list[int]) -> list[int]:
        """Checksum of each row, over this rank's planes."""
        assert self._region is not None
        return self._region.checksums(rows, columns)

    def millrace_kv_begin(
        self,
        key: str,
        kind: str,
        peers: bytes,
        source_rows: list[list[int]],
        target_rows: list[list[int]],
        columns: list[int],
    ) -> tuple[str, Any]:
        """Starts a read from the peer of the same rank: bytes and descriptors."""
        region = self._region
        assert region is not None
        return attempt(
            lambda: region.begin(
                key,
                kind=CopierKind(kind),
                peer=kv_words.decode_ranks(peers)[self.rank],
                source_rows=source_rows,
                target_rows=target_rows,
                columns=columns,
            )
        )

    def millrace_kv_advance(self, key: str, bytes_max: int) -> tuple[str, Any]:
        """Whether a read is done."""
        region = self._region
        assert region is not None
        return attempt(lambda: region.advance(key, bytes_max))

    def millrace_kv_cancel(self, key: str) -> None:
        if self._region is not None:
            self._region.cancel(key)

    def millrace_kv_forget(self, kind: str, peers: bytes) -> None:
        """Gives up the link to a peer."""
        if self._region is not None:
            self._region.forget(CopierKind(kind), kv_words.decode_ranks(peers)[self.rank])

    def shutdown(self) -> None:
        """Gives up the sockets besides what vLLM gives up."""
        if self._region is not None:
            self._region.close()
        super().shutdown()
