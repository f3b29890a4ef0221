"""A process that owns regions for the suite: prints their ranks, serves them until its input ends, answers by command.

``python -m tests.contract.copier.peer KIND FOLDER NAME SIDES``; commands, one a line: ``read RANK SOURCE TARGET`` reads
a block of another process's region into the first side and prints its first byte.
"""

import base64
import sys
from pathlib import Path

import msgspec
from millrace.contracts.kv import CopierKind, KvRank

from tests.contract.copier.sides import Side, make, plan


def main(kind: str, folder: str, name: str, count: str) -> None:
    sides = [make(CopierKind(kind), Path(folder), f"{name}{index}", seed=index + 1) for index in range(int(count))]
    print(*[base64.b64encode(msgspec.json.encode(side.rank)).decode() for side in sides], flush=True)
    for line in sys.stdin:
        _, rank, source, target = line.split()
        print(
            read(sides[0], msgspec.json.decode(base64.b64decode(rank), type=KvRank), int(source), int(target)),
            flush=True,
        )


def read(side: Side, peer: KvRank, source: int, target: int) -> int:
    link = side.copier.connect(peer)
    transfer = link.begin(plan(peer, [source], side.rank, [target]))
    while not transfer.advance(1 << 20):
        pass
    link.close()
    return int(side.memory[target * side.rank.planes[0].stride])


if __name__ == "__main__":
    main(*sys.argv[1:])
