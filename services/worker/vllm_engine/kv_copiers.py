"""The copiers of one rank. Those within a host are there by default; the others where the configuration names them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from millrace.contracts.kv import CopierKind
from millrace.kvcopy.copier_port import Copier, CopierError
from millrace.kvcopy.shared_memory_copier import SharedMemoryCopier

from services.worker.vllm_engine.kv_memory import KvMemory

#: Where nothing is named.
ON_HOST, ON_DEVICE = (CopierKind.SHARED_MEMORY,), (CopierKind.NIXL,)


def build(memory: KvMemory, socket: Path, wanted: Sequence[CopierKind]) -> dict[CopierKind, Copier]:
    """The copiers wanted, in that order, or the defaults; one that cannot be made is left out.

    Raises CopierError: none can.
    """
    copiers: dict[CopierKind, Copier] = {}
    failures: list[str] = []
    for kind in wanted or (ON_HOST if memory.device < 0 else ON_DEVICE):
        try:
            copiers[kind] = _made(kind, memory, socket)
        except CopierError as error:
            failures.append(f"{kind}: {error}")
    if not copiers:
        raise CopierError("; ".join(failures))
    return copiers


def _made(kind: CopierKind, memory: KvMemory, socket: Path) -> Copier:
    # What reaches a GPU or a network card is imported only where it is wanted: it brings libraries into the process.
    match kind:
        case CopierKind.SHARED_MEMORY if memory.shared is not None:
            return SharedMemoryCopier(memory.shared, socket)
        case CopierKind.NIXL:
            from millrace.kvcopy.nixl_copier import NixlCopier

            return NixlCopier(address=memory.address, region_bytes=memory.size, device=memory.device)
    raise CopierError("not for KV in host memory" if memory.device < 0 else "not for KV on a GPU")
