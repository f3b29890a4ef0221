"""What tensor parallelism adds to a step: all-reduces between the GPUs of a group."""

from __future__ import annotations

import msgspec

from millrace.enginemodel.measured import Profile

#: All-reduces of a transformer layer: after attention, and after the MLP.
REDUCES_PER_LAYER = 2


class AllReduce(msgspec.Struct, frozen=True):
    """The time of one all-reduce, ns, by its message in bytes."""

    profile: Profile

    @classmethod
    def straight(cls, *, latency: float, bytes_per_second: float) -> AllReduce:
        """A latency (ns) and a bandwidth, where nothing finer was measured."""
        return cls(Profile((0, 1 << 30), (latency, latency + (1 << 30) / bytes_per_second * 1e9)))

    def ns(self, size: float) -> float:
        """Time of a message of ``size`` bytes, ns."""
        return self.profile.at(size)
