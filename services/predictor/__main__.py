"""Runs a predictor: ``python -m services.predictor --config FILE``."""

from __future__ import annotations

import sys

from millrace.contracts.catalog import Role
from millrace.hosting.service import host
from millrace.hosting.step_times import with_step_times

from services.predictor.actor import ACCEPTS
from services.predictor.build import build
from services.predictor.config import PredictorConfig

if __name__ == "__main__":
    sys.exit(host(Role.PREDICTOR, PredictorConfig, ACCEPTS, build, deps_of=with_step_times))
