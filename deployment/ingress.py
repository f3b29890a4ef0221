"""Runs an ingress that hosts predictors and taggers: their answers then cost no way over the bus.

python -m deployment.ingress --config FILE [--predictor FILE] [--tagger FILE]
"""

from __future__ import annotations

import argparse
import sys

from millrace.actor.actor import Actor
from millrace.actor.config import load_config
from millrace.actor.deps import ActorDeps
from millrace.actor.errors import BusError, ConfigError
from millrace.actor.loop import run_to_end
from millrace.contracts.catalog import Role
from millrace.hosting.companion import Companion
from millrace.hosting.step_times import with_step_times
from millrace.telemetry import Telemetry

from services.ingress.__main__ import serve
from services.ingress.config import IngressConfig
from services.predictor.actor import ACCEPTS as PREDICTOR_ACCEPTS
from services.predictor.build import build as build_predictor
from services.predictor.config import PredictorConfig
from services.tagger.actor import ACCEPTS as TAGGER_ACCEPTS
from services.tagger.build import build as build_tagger
from services.tagger.config import TaggerConfig
from services.tagger.shell import TaggerShell


def predictor(config: PredictorConfig) -> Companion:
    """A predictor of this configuration."""

    def make(deps: ActorDeps, telemetry: Telemetry) -> Actor:
        return build_predictor(config, with_step_times(config, deps, telemetry))

    return Companion(Role.PREDICTOR, config, PREDICTOR_ACCEPTS, make)


def tagger(config: TaggerConfig) -> Companion:
    """A tagger of this configuration."""

    def make(deps: ActorDeps, telemetry: Telemetry) -> Actor:
        return build_tagger(config, deps)

    return Companion(Role.TAGGER, config, TAGGER_ACCEPTS, make, shell=TaggerShell(config))


def main() -> int:
    """Parse the command line; returns the exit code. What went wrong at start is said on stderr."""
    parser = argparse.ArgumentParser(prog="python -m deployment.ingress", description=__doc__)
    parser.add_argument("--config", required=True, help="TOML or JSON file of the ingress")
    parser.add_argument("--predictor", metavar="FILE", help="configuration of a predictor that it hosts")
    parser.add_argument("--tagger", metavar="FILE", help="configuration of a tagger that it hosts")
    asked = parser.parse_args()
    try:
        companions = []
        if asked.predictor:
            companions.append(predictor(load_config(PredictorConfig, asked.predictor)))
        if asked.tagger:
            companions.append(tagger(load_config(TaggerConfig, asked.tagger)))
        run_to_end(serve(load_config(IngressConfig, asked.config), companions))
    except (ConfigError, BusError, OSError) as error:
        sys.stderr.write(f"ingress: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
