"""Runs a coordinator: ``python -m services.coordinator --config FILE``."""

from __future__ import annotations

import sys

from millrace.contracts.catalog import Role
from millrace.hosting.service import host

from services.coordinator.build import ACCEPTS, build
from services.coordinator.config import CoordinatorConfig
from services.coordinator.shell import CoordinatorShell

if __name__ == "__main__":
    sys.exit(host(Role.COORDINATOR, CoordinatorConfig, ACCEPTS, build, shell_of=CoordinatorShell))
