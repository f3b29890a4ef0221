"""Compiled from native/kvcopy. Raises ValueError for what would leave a region."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_Offsets = npt.NDArray[np.int64]
_Bytes = npt.NDArray[np.uint8]

INTERFACE: int

class Planner:
    def __init__(self, panels: Sequence[tuple[int, int, int, int, int]], /) -> None:
        """Panels as in ``plan.Panel``."""
    def plan(self, source: Sequence[int], target: Sequence[int], /) -> tuple[_Offsets, _Offsets, _Offsets]: ...

class Checksums:
    def __init__(self, planes: Sequence[tuple[int, int, int]], /) -> None:
        """Planes are offset, stride, bytes."""
    def of(self, memory: _Bytes, blocks: Sequence[int], /) -> list[int]: ...

def copy_pieces(
    sources: _Offsets,
    targets: _Offsets,
    lengths: _Offsets,
    source: _Bytes,
    target: _Bytes,
    position: tuple[int, int],
    bytes_max: int,
    /,
) -> tuple[int, int]: ...
