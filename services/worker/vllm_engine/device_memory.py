"""Share of time in which GPUs read or write their memory, from NVML, for the load indicators of policies on roles.

NVML tells it per device as ``utilization.memory``: the percentage of its last sample period (a sixth of a second to a
second, by product) in which device memory was read or written. Without a GPU, or where NVML refuses, it is not
measured, and indicators take the step model's estimate (``policies/roles/indicators.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec
from millrace.actor.engine import EngineSnapshot

logger = logging.getLogger(__name__)

#: NVML's own samples are not younger.
READ_NS = 1_000_000_000

#: Reads the shares of all devices of an engine, 0 to 1.
ReadShares = Callable[[], Sequence[float]]


class MemoryBusy:
    """Adds the share to snapshots. Reads it at most once a second."""

    def __init__(self, read: ReadShares | None, *, error: type[Exception] = OSError) -> None:
        """Args:
        read: None where nothing is measured.
        error: That ``read`` raises where a device does not answer; nothing is measured from then on.
        """
        self._read = read
        self._error = error
        self._at_ns = -READ_NS
        self._share: float | None = None

    def noted(self, snapshot: EngineSnapshot) -> EngineSnapshot:
        """The snapshot with the last share."""
        if self._read is None:
            return snapshot
        if snapshot.at_ns - self._at_ns >= READ_NS:
            self._at_ns, self._share = snapshot.at_ns, self._mean()
        return msgspec.structs.replace(snapshot, memory_busy=self._share)

    def _mean(self) -> float | None:
        assert self._read is not None
        try:
            shares = self._read()
        except self._error as error:
            logger.warning("memory bandwidth is not measured any more: %s", error)
            self._read = None
            return None
        return sum(shares) / len(shares) if shares else None


def memory_busy(devices: int) -> MemoryBusy:
    """Of an engine on the first ``devices`` visible GPUs; measures nothing where there is none."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return MemoryBusy(None)
    from vllm.third_party import pynvml

    try:
        pynvml.nvmlInit()
        numbers = [current_platform.device_id_to_physical_device_id(index) for index in range(devices)]
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in numbers]
    except (pynvml.NVMLError, ValueError) as error:
        logger.warning("memory bandwidth is not measured: %s", error)
        return MemoryBusy(None)
    return MemoryBusy(
        lambda: [pynvml.nvmlDeviceGetUtilizationRates(handle).memory / 100 for handle in handles],
        error=pynvml.NVMLError,
    )
