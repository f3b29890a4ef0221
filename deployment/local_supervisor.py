"""Runs a local cluster whose every configuration was checked first: what `millrace up` starts.

python -m deployment.local_supervisor --options JSON
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from millrace.cluster.spec import ClusterSpec

    from services.supervisor.launcher import ForkServers

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

#: What workers with a real engine import, in the environment that vLLM and torch read at their import.
VLLM = (
    "services.worker.vllm_engine.environment:prepare",
    "services.worker.vllm_engine.preload:preload",
    "services.worker.__main__",
)


def start() -> int:
    """Import the supervisor and run it; Ctrl-C ends the process without a traceback while modules load."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from deployment.config_check import check_files
    from services.supervisor.__main__ import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    return main(check_files, fork_servers)


@contextlib.contextmanager
def fork_servers(spec: ClusterSpec, logs: Path) -> Iterator[ForkServers]:
    """One for services; where there may be vLLM engines, one for these, which imports meanwhile."""
    from millrace.cluster.spec import EngineName
    from millrace.supervision.fork_server import ForkServer

    from services.supervisor.config import Imports

    groups = [group for model in spec.models for group in model.groups]
    wanted: dict[Imports, tuple[str, ...]] = {Imports.SERVICES: SERVICES}
    if any(group.engine is EngineName.VLLM and not group.python for group in groups):
        wanted[Imports.VLLM] = VLLM
    printing = {Imports.VLLM: logs / "worker-fork-server.log"}
    opened = {imports: ForkServer.open(preload, printing.get(imports)) for imports, preload in wanted.items()}
    servers = {imports: server for imports, server in opened.items() if server is not None}
    try:
        yield servers
    finally:
        for server in servers.values():
            server.close()


if __name__ == "__main__":
    sys.exit(start())
