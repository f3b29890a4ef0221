"""A process that owns regions for the suite: prints their ranks, serves them until its input ends.

``python -m tests.contract.copier.peer KIND FOLDER NAME SIDES``
"""

import base64
import sys
from pathlib import Path

import msgspec
from millrace.contracts.kv import CopierKind

from tests.contract.copier.sides import make

if __name__ == "__main__":
    kind, folder, name, count = sys.argv[1:]
    sides = [make(CopierKind(kind), Path(folder), f"{name}{index}", seed=index + 1) for index in range(int(count))]
    print(*[base64.b64encode(msgspec.json.encode(side.rank)).decode() for side in sides], flush=True)
    sys.stdin.read()
