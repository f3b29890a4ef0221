"""Runs a page: ``python -m services.page --config FILE``."""

from __future__ import annotations

import sys

from millrace.actor.deps import ActorDeps
from millrace.hosting.service import host

from services.page.actor import ACCEPTS, PageActor
from services.page.config import PageConfig
from services.page.history import PageRun
from services.page.server import PageServer


def main() -> int:
    """Serves the live cluster, the server's only run."""
    runs: list[PageRun] = []

    def build(config: PageConfig, deps: ActorDeps) -> PageActor:
        actor = PageActor(config, incarnation=deps.incarnation)
        runs.append(PageRun("live", actor))
        return actor

    return host("page", PageConfig, ACCEPTS, build, shell_of=lambda config: PageServer(config, runs))


if __name__ == "__main__":
    sys.exit(main())
