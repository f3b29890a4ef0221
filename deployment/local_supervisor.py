"""Runs a local cluster whose every configuration was checked first: what `millrace up` starts.

python -m deployment.local_supervisor --options JSON
"""

from __future__ import annotations

import signal
import sys

#: What the fork server imports: every service that a supervisor starts.
SERVICES = (
    "deployment.ingress",
    "deployment.migrator",
    "services.coordinator.__main__",
    "services.judge.__main__",
    "services.predictor.__main__",
    "services.tagger.__main__",
    "services.worker.__main__",
)


def start() -> int:
    """Import the supervisor and run it; Ctrl-C ends the process without a traceback while modules load."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from millrace.supervision.fork_server import ForkServer

    from deployment.config_check import check_files
    from services.supervisor.__main__ import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Before there is a thread, a lock or a file of this cluster that the fork server would share.
    fork_server = ForkServer.open(SERVICES)
    try:
        return main(check_files, fork_server)
    finally:
        if fork_server is not None:
            fork_server.close()


if __name__ == "__main__":
    sys.exit(start())
