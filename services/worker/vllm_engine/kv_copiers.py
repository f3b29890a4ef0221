"""The copiers of one rank. Those within a host are there by default; the others where the configuration names them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from millrace.contracts.kv import CopierKind
from millrace.kvcopy.copier import Copier, CopierError
from millrace.kvcopy.cross_memory import CrossMemoryCopier
from millrace.kvcopy.memory import SharedRegion
from millrace.kvcopy.shared_memory import SharedMemoryCopier

#: Tried in this order where KV lies in host memory.
ON_HOST = (CopierKind.SHARED_MEMORY, CopierKind.CROSS_MEMORY)


def build(memory: SharedRegion, socket: Path, wanted: Sequence[CopierKind]) -> dict[CopierKind, Copier]:
    """The copiers wanted, in that order, or those of the host; one that cannot be made is left out.

    Raises CopierError: none can.
    """
    makers: dict[CopierKind, Callable[[], Copier]] = {
        CopierKind.SHARED_MEMORY: lambda: SharedMemoryCopier(memory, socket),
        CopierKind.CROSS_MEMORY: lambda: CrossMemoryCopier(memory.view),
        CopierKind.NIXL: lambda: _nixl(memory),
    }
    copiers: dict[CopierKind, Copier] = {}
    failures: list[str] = []
    for kind in wanted or ON_HOST:
        try:
            copiers[kind] = _made(kind, makers)
        except CopierError as error:
            failures.append(f"{kind}: {error}")
    if not copiers:
        raise CopierError("; ".join(failures))
    return copiers


def _made(kind: CopierKind, makers: dict[CopierKind, Callable[[], Copier]]) -> Copier:
    if kind not in makers:
        raise CopierError("not for KV in host memory")
    return makers[kind]()


def _nixl(memory: SharedRegion) -> Copier:
    # Imported only where it is wanted: it brings UCX into the process.
    from millrace.kvcopy.nixl_copier import NixlCopier

    return NixlCopier(address=memory.address, region_bytes=memory.size)
