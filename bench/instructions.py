"""Instructions that a stretch of Python executes, counted by valgrind's callgrind where it is installed.

What else runs on the machine, its caches and its clock do not change them: a count says how much code is executed, not
how long that takes. A process runs under callgrind from its start, and counting is switched on and off in it by
``callgrind_control``, so that start and imports are neither counted nor slowed down much.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

#: A process under callgrind: 20 s of start and a hundred times as long as otherwise for what is counted.
SECONDS_MAX = 600
#: Times that an order is given.
ORDERS_MAX = 3
_TOTALS = re.compile(r"^totals: (\d+)", re.MULTILINE)


class CountError(Exception):
    """A process under callgrind failed."""


def is_counted_here() -> bool:
    """Whether valgrind is installed."""
    return shutil.which("valgrind") is not None and shutil.which("callgrind_control") is not None


def begin() -> None:
    """Count from here on, in a process that `counted` started."""
    _control("--instr=on")


def end() -> NoReturn:
    """End the process; its own end is not counted."""
    _control("--dump")
    sys.stdout.flush()
    os._exit(0)


def counted(module: str, words: Sequence[str]) -> int:
    """Instructions that a module's process counted from ``begin`` to ``end``.

    Raises:
        CountError: the process failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "counts"
        valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}"]
        command = [*valgrind, sys.executable, "-m", module, *words]
        # A process that exits at once leaves its temporary files: they go with this folder.
        environment = tree_environment(Path.cwd()) | {"TMPDIR": folder}
        run = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX, env=environment, check=False)
        if run.returncode:
            raise CountError(f"{module} under valgrind exited with {run.returncode}:\n{run.stderr[-2000:]}")
        return total(Path(f"{out}.1"))  # a dump is a numbered file


def tree_environment(tree: Path) -> dict[str, str]:
    """Environment of a process that runs the code of a checkout, whatever is installed."""
    path = os.pathsep.join([str(tree / "libs"), str(tree), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0"}


def total(path: Path) -> int:
    """The instructions of one dump."""
    found = _TOTALS.search(path.read_text())
    assert found is not None, f"{path}: no totals"
    return int(found[1])


def _control(order: str) -> None:
    """Give callgrind an order, again where it was not heard. It listens while code runs: nothing here may sleep."""
    for _ in range(ORDERS_MAX):
        process = subprocess.Popen(["callgrind_control", order, str(os.getpid())], stdout=subprocess.DEVNULL)
        while process.poll() is None:
            pass
        if process.returncode == 0:
            return
    raise subprocess.CalledProcessError(process.returncode, process.args)
