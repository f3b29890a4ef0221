"""Runs a local cluster whose every configuration was checked first: what `millrace up` starts.

python -m deployment.local_supervisor --options JSON
"""

from __future__ import annotations

import signal
import sys


def start() -> int:
    """Import the supervisor and run it; Ctrl-C ends the process without a traceback while modules load."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from deployment.config_check import check_files
    from services.supervisor.__main__ import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    return main(check_files)


if __name__ == "__main__":
    sys.exit(start())
