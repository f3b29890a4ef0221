"""A source in a process of its own: a region of known bytes, offered by the copier that is asked for.

    python -m tests.contract.copier.reading_peer KIND REGION_BYTES SEED

Writes one line to stdout (its KvRank as hex), then obeys lines on stdin: ``change`` (other bytes), ``close`` (the
copier), end of file (leave).
"""

import sys

import msgspec
import numpy as np
from millrace.contracts.kv import CopierKind, KvPlane, KvRank
from millrace.kvcopy.copier_port import Copier
from millrace.kvcopy.nixl_copier import NixlCopier


def content(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def copier_of(kind: CopierKind, memory: np.ndarray) -> Copier:
    """The copier of this kind over this memory."""
    address, size = int(memory.ctypes.data), len(memory)
    assert kind is CopierKind.NIXL
    return NixlCopier(address=address, region_bytes=size)


def rank_of(size: int) -> KvRank:
    return KvRank(planes=[KvPlane(0, size, size)], region_bytes=size)


def main() -> None:
    kind, size, seed = CopierKind(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    memory = content(size, seed)
    copier = copier_of(kind, memory)
    print(msgspec.msgpack.encode(copier.offer(rank_of(size))).hex(), flush=True)
    for line in sys.stdin:
        if line.strip() == "change":
            memory[:] = content(size, seed + 1)
        elif line.strip() == "close":
            copier.close()
        print("done", flush=True)
    copier.close()


if __name__ == "__main__":
    main()
