"""Time that tensor parallelism adds to a step: all-reduces between the GPUs of a group."""

from __future__ import annotations

import msgspec

#: All-reduces of a transformer layer: after attention, and after the MLP.
REDUCES_PER_LAYER = 2


class TensorParallel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group of GPUs that share each layer, described for a model that was fitted on one GPU.

    Attributes:
        ways: GPUs of the group.
        hidden: Width of the model: an all-reduce carries 2 bytes of it per token.
        latency: Of an all-reduce of few bytes, ns.
        bytes_per_second: What large all-reduces approach.
        undivided: Part of each step's fixed time that every GPU has whole: launches, the host, ns.
    """

    ways: int
    layers: int
    hidden: int
    latency: float
    bytes_per_second: float
    undivided: float = 0.0

    def __post_init__(self) -> None:
        for name in ("ways", "layers", "hidden", "bytes_per_second"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"parallel.{name} must be at least 1, is {getattr(self, name)}")
        for name in ("latency", "undivided"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"parallel.{name} must be at least 0, is {getattr(self, name)}")

    @property
    def reduce_step(self) -> float:
        """All-reduces of a step, however small, ns."""
        return REDUCES_PER_LAYER * self.layers * self.latency if self.ways > 1 else 0.0

    @property
    def reduce_token(self) -> float:
        """All-reduces of each token computed in a step, ns."""
        if self.ways == 1:
            return 0.0
        return REDUCES_PER_LAYER * self.layers * 2 * self.hidden / self.bytes_per_second * 1e9
