"""Cost of KV moves for an engine whose own processor does the copying: a share of it before each step.

vLLM on a CPU works this way (services/worker/vllm_engine/kv_mover.py). Between two steps the target copies, and both
sides compute checksums: at most ``bytes_per_step`` at a time, and more if no sequence waits for a step. A read is
complete when it is copied and compared. A lease is answered when its checksums are computed. Work that a frozen
sequence waits for is done at once, whatever its size: the checksums of a freeze, and the target's last read. If a
network card or a GPU's copy engine moves the KV, steps cost the same as without moves.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

#: Copied at a time where no sequence waits for a step, as by the real engine.
IDLE_BYTES = 64 << 20


class CopyCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speed of copies and checksums on an engine's processor, and the bytes processed before each step.

    Attributes:
        copy_bytes_per_s: Into the target's blocks; 0 where something else copies, and the engine gives no time.
        checksum_bytes_per_s: Of reading blocks for their checksums, at both ends; 0 where that costs nothing.
        bytes_per_step: At most before each step, shared among all that is to be done.
    """

    copy_bytes_per_s: float = 0.0
    checksum_bytes_per_s: float = 0.0
    bytes_per_step: int = 1 << 20

    @property
    def copy_ns(self) -> float:
        """Of a byte that is copied."""
        return _ns(self.copy_bytes_per_s)

    @property
    def checksum_ns(self) -> float:
        """Of a byte that is summed."""
        return _ns(self.checksum_bytes_per_s)


def _ns(bytes_per_s: float) -> float:
    return 1e9 / bytes_per_s if bytes_per_s > 0 else 0.0


#: A network card, or the copy engines of a GPU.
NO_COST = CopyCost()


class CopyJob:
    """Bytes to be copied or summed.

    Attributes:
        done: Called once when they are, unless the job was dropped before.
        urgent: A sequence is frozen until then: done in one go.
    """

    __slots__ = ("byte_ns", "done", "left_bytes", "urgent")

    def __init__(self, count: int, byte_ns: float, done: Callable[[], None], *, urgent: bool = False) -> None:
        self.urgent = urgent
        self.left_bytes = count
        self.byte_ns = byte_ns
        self.done = done


class CopyWork:
    """Copy jobs that an engine's processor still has to do. Reads no clock."""

    def __init__(self) -> None:
        self.cost = NO_COST
        self._jobs: list[CopyJob] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def owe(self, job: CopyJob) -> None:
        self._jobs.append(job)

    def drop(self, job: CopyJob) -> None:
        if job in self._jobs:
            self._jobs.remove(job)

    def share(self, *, idle: bool) -> tuple[int, list[CopyJob]]:
        """Does as much as is done before a step.

        Returns: the time that it takes, ns, and the jobs that are done then, in order.
        """
        if not self._jobs:
            return 0, []
        each = max(1, (IDLE_BYTES if idle else self.cost.bytes_per_step) // len(self._jobs))
        spent_ns = 0.0
        for job in self._jobs:
            count = job.left_bytes if job.urgent else min(each, job.left_bytes)
            job.left_bytes -= count
            spent_ns += count * job.byte_ns
        done = [job for job in self._jobs if not job.left_bytes]
        self._jobs = [job for job in self._jobs if job.left_bytes]
        return round(spent_ns), done
