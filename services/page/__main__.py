"""Runs a page: ``python -m services.page --config FILE``."""

from __future__ import annotations

import sys

from millrace.actor.deps import ActorDeps
from millrace.hosting.service import host

from services.page.actor import ACCEPTS, PageActor
from services.page.config import PageConfig
from services.page.server import PageServer


def main() -> int:
    """Serves the live cluster, the server's only run."""
    runs: list[PageActor] = []

    def build(config: PageConfig, deps: ActorDeps) -> PageActor:
        runs.append(PageActor(config, incarnation=deps.incarnation))
        return runs[0]

    return host("page", PageConfig, ACCEPTS, build, shell_of=lambda config: PageServer(config, runs))


if __name__ == "__main__":
    sys.exit(main())
