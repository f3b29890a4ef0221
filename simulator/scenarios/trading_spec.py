"""Trading settings of a scenario: a broker for each instance, and how it trades."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from millrace.actor.config import BusConfig
from millrace.contracts.broker import MoveReason
from millrace.policies.stages.refinement import RefinementParameters

from services.broker.config import BrokerConfig, BrokerLimits, FenceConfig, MemoryConfig, TradingConfig, trading_policy

#: A broker is called so, with the first of its instances behind it.
BROKER_PREFIX = "broker-"


class TradingSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Moves of running sequences by brokers. Without ``migration.on`` nothing here has an effect.

    Attributes:
        policy: Trading policy; ``none`` balances nothing.
        parameters: Of the policy.
        reasons: For which of these sequences move.
        fences: What holds sequences back.
        limits: Of each broker.
        memory: When sequences leave, or are not taken, because memory may run short.
        refinement: How boundaries follow the traffic.
    """

    policy: str = "none"
    parameters: dict[str, Any] = {}
    reasons: tuple[MoveReason, ...] = tuple(MoveReason)
    fences: FenceConfig = FenceConfig()
    limits: BrokerLimits = BrokerLimits()
    memory: MemoryConfig = MemoryConfig()
    refinement: RefinementParameters = RefinementParameters()

    def broker(self, instances: Sequence[str], bus: BusConfig) -> BrokerConfig:
        """The broker of these instances. Raises ConfigError where the policy or a parameter is wrong."""
        trading = TradingConfig(policy=self.policy, parameters=self.parameters, reasons=self.reasons)
        trading_policy(trading)
        return BrokerConfig(
            name=BROKER_PREFIX + instances[0],
            instances=list(instances),
            bus=bus,
            trading=trading,
            fences=self.fences,
            limits=self.limits,
            memory=self.memory,
            refinement=self.refinement,
        )
