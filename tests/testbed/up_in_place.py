"""``millrace`` as it is, except that `up` goes on as the supervisor in this process: an exec would import all again."""

import os
import sys
from typing import NoReturn

from millrace.cli.__main__ import main
from millrace.supervision.fork_server import run_module
from setproctitle import setproctitle


def _go_on(path: str, command: list[str]) -> NoReturn:
    """Takes the place of ``os.execv`` for ``python -m MODULE``."""
    assert command[:2] == [path, "-m"], command
    sys.argv = command[2:]
    setproctitle(" ".join(command))  # by which `millrace down` knows a supervisor
    sys.exit(run_module(command[2]))


if __name__ == "__main__":
    os.execv = _go_on  # type: ignore[assignment]
    sys.exit(main())
