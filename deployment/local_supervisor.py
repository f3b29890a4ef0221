"""Runs a local cluster whose every configuration was checked first: what `millrace up` starts.

python -m deployment.local_supervisor --options JSON
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from millrace.cli.running import without_websockets

if TYPE_CHECKING:
    from millrace.cluster.spec import ClusterSpec
    from millrace.supervision.fork_server import ForkServer

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
    from services.supervisor.config import LaunchOptions

    early = None  # imports take longest of all that a start with engines waits for
    with contextlib.suppress(msgspec.MsgspecError):  # the supervisor says what is wrong
        options = msgspec.json.decode(sys.argv[-1], type=LaunchOptions)
        early = _for_engines(options.spec, Path(options.directory) / "logs")
    with without_websockets():
        from deployment.config_check import check_files
        from services.supervisor.__main__ import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    return main(check_files, partial(fork_servers, early))


def _for_engines(spec: ClusterSpec, logs: Path) -> ForkServer | None:
    from millrace.cluster.spec import EngineName
    from millrace.supervision.fork_server import ForkServer

    groups = [group for model in spec.models for group in model.groups]
    if any(group.engine is EngineName.VLLM and not group.python for group in groups):
        return ForkServer.open(VLLM, logs / "worker-fork-server.log")
    return None


@contextlib.contextmanager
def fork_servers(early: ForkServer | None, spec: ClusterSpec, logs: Path) -> Iterator[ForkServers]:
    """One for services; where there may be vLLM engines, one for these, which imports meanwhile or has begun early."""
    from millrace.supervision.fork_server import ForkServer

    from services.supervisor.config import Imports

    opened = {Imports.SERVICES: ForkServer.open(SERVICES), Imports.VLLM: early or _for_engines(spec, logs)}
    servers = {imports: server for imports, server in opened.items() if server is not None}
    try:
        yield servers
    finally:
        for server in servers.values():
            server.close()


if __name__ == "__main__":
    sys.exit(start())
