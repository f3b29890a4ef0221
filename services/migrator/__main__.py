"""Runs a migrator: ``python -m services.migrator --config FILE``."""

from __future__ import annotations

import sys

from millrace.contracts.catalog import Role
from millrace.hosting.service import host

from services.migrator.actor import ACCEPTS
from services.migrator.build import build
from services.migrator.config import MigratorConfig

if __name__ == "__main__":
    sys.exit(host(Role.MIGRATOR, MigratorConfig, ACCEPTS, build))
