"""The compiled planner, checksum and copies, where built. The only place that imports ``millrace_native.kvcopy``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from millrace.contracts.kv import KvPlane
from millrace.kvcopy.copier_port import CopyPlan

#: Changes with the calls below; a build of another interface is of older or newer sources.
INTERFACE = 1

try:
    from millrace_native import kvcopy as _module
except ImportError:  # not built here: the reference does it
    AVAILABLE = False
else:
    #: Whether the compiled module is there.
    AVAILABLE = _module.INTERFACE == INTERFACE


def planner(panels: list[tuple[int, int, int, int, int]]) -> _module.Planner:
    """The compiled planner of a layout; a panel is source, source stride, target, target stride, bytes."""
    return _module.Planner(panels)


def checksums(planes: list[KvPlane]) -> _module.Checksums:
    """The compiled checksums of a layout."""
    return _module.Checksums([(plane.offset, plane.stride, plane.bytes) for plane in planes])


def copy_pieces(
    plan: CopyPlan,
    *,
    source: npt.NDArray[np.uint8],
    target: npt.NDArray[np.uint8],
    position: tuple[int, int],
    bytes_max: int,
) -> tuple[int, int]:
    """As ``shared_memory_copier.copy_pieces``, without the interpreter's lock."""
    return _module.copy_pieces(plan.source, plan.target, plan.lengths, source, target, position, bytes_max)


def read_pieces(
    plan: CopyPlan,
    *,
    process: int,
    region: tuple[int, int],
    target: npt.NDArray[np.uint8],
    position: tuple[int, int],
    bytes_max: int,
) -> tuple[tuple[int, int], int]:
    """Goes on reading out of a process whose region is (address, bytes). Returns the position, and errno or 0."""
    piece, done, error = _module.read_pieces(
        plan.source, plan.target, plan.lengths, process, *region, target, position, bytes_max
    )
    return (piece, done), error
