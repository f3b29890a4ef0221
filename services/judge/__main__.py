"""Runs a judge: ``python -m services.judge --config FILE``."""

from __future__ import annotations

import sys

from millrace.actor.deps import ActorDeps
from millrace.actor.hosting import host
from millrace.contracts.catalog import Role
from millrace.telemetry import Telemetry

from services.judge.actor import ACCEPTS
from services.judge.build import JudgeDeps, build
from services.judge.config import JudgeConfig
from services.judge.files import read_curve, read_judges
from services.judge.shell import JudgeShell


def with_files(config: JudgeConfig, deps: ActorDeps, telemetry: Telemetry) -> JudgeDeps:
    """Reads the confidence judges. One that cannot be read is logged and left out."""
    judges, problems = read_judges(config.judges)
    for model, error in problems.items():
        telemetry.logger.error("judge_unreadable", model=model, error=error)
    return JudgeDeps(**vars(deps), judges=judges, curve=read_curve(config.llm))


if __name__ == "__main__":
    sys.exit(host(Role.JUDGE, JudgeConfig, ACCEPTS, build, deps_of=with_files, shell_of=JudgeShell))
