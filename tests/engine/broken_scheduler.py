"""A scheduler that hands arriving sequences their blocks in the wrong order: what a self-test must find."""

from vllm.v1.request import Request

from services.worker.vllm_engine.snapshot_scheduler import SnapshotScheduler


class SwappingScheduler(SnapshotScheduler):
    """Swaps the first and the last block of whatever comes with its KV.

    (Swapping two full ones would change nothing: attention sums over them, and keys know their positions.)
    """

    def add_request(self, request: Request) -> None:
        """Queues a request, its blocks swapped."""
        super().add_request(request)
        blocks = self.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks.get(request.request_id)
        if blocks:
            blocks[0], blocks[-1] = blocks[-1], blocks[0]
