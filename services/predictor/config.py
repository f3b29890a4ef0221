"""Configuration of the predictor."""

from __future__ import annotations

from typing import Annotated

from millrace.actor.config import ProcessConfig
from millrace.actor.config_marks import CONSTANT, WIRED
from millrace.contracts.bounds import Count, Natural
from millrace.membership.config import MembershipConfig


class PredictorConfig(ProcessConfig, frozen=True, kw_only=True):
    """Configuration of a predictor process.

    Attributes:
        name: Unique name on the bus.
        shard: Which of ``shards``, from 0. Several processes with the same shard are replicas of each other.
        shards: Instances are spread over so many by a hash of their name; 1 for no spreading.
        default_output_tokens: Length of an output that nobody predicted, until outcomes tell the mean.
        learn_lengths: Take that mean from outcomes.
        calibrate: Scale step times by what the engine really takes, and fit them where no set is known.
        prefixes: Follow what instances have in their prefix caches; else every prompt is taken as not cached.
        transit_us: From a decision until the engine has the sequence, microseconds: ingress, bus and worker.
        step_times: Files of step-time parameters besides those that ship, by the name that instances give in their
            record. One that cannot be read is as good as none.
        membership: When an instance counts as silent.
    """

    name: Annotated[str, WIRED] = "predictor-0"
    shard: Annotated[Natural, WIRED] = 0
    shards: Annotated[Count, WIRED] = 1
    default_output_tokens: Annotated[Count, CONSTANT] = 128
    learn_lengths: Annotated[bool, CONSTANT] = True
    calibrate: bool = True
    prefixes: bool = True
    transit_us: Annotated[Natural, CONSTANT] = 1_000
    step_times: Annotated[dict[str, str], WIRED] = {}
    membership: MembershipConfig = MembershipConfig()

    def __post_init__(self) -> None:
        if self.shard >= self.shards:
            raise ValueError(f"shard must be in [0, shards), is {self.shard} of {self.shards}")
