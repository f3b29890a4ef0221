"""Builds the judge's actor."""

from __future__ import annotations

from millrace.actor.deps import ActorDeps
from millrace.policies.judges import JUDGES

from services.judge.actor import JudgeActor
from services.judge.config import JudgeConfig
from services.judge.metrics import JudgeMetrics


def build(config: JudgeConfig, deps: ActorDeps) -> JudgeActor:
    """The actor of a configuration.

    Raises:
        ConfigError: no such judge, or parameters that it does not have.
    """
    policy, parameters = JUDGES.choose(config.judge, config.parameters, key="judge")
    metrics = JudgeMetrics(deps.registry)
    return JudgeActor(config, incarnation=deps.incarnation, policy=policy, parameters=parameters, metrics=metrics)
