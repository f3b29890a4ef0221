"""Runs a judge: ``python -m services.judge --config FILE``."""

from __future__ import annotations

import sys

from millrace.contracts.catalog import Role
from millrace.hosting.service import host

from services.judge.actor import ACCEPTS
from services.judge.build import build
from services.judge.config import JudgeConfig
from services.judge.shell import JudgeShell

if __name__ == "__main__":
    sys.exit(host(Role.JUDGE, JudgeConfig, ACCEPTS, build, shell_of=JudgeShell))
