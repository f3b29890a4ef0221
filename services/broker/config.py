"""Configuration of the broker."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from millrace.actor.config import ProcessConfig
from millrace.actor.config_marks import CONSTANT, WIRED
from millrace.contracts.broker import MoveReason
from millrace.policies.stages.refinement import RefinementParameters
from millrace.policies.trading import TRADING_POLICIES, TradingPolicy

Count = Annotated[int, msgspec.Meta(ge=0)]
Span = Annotated[int, msgspec.Meta(ge=1)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class TradingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether running sequences move for balance, and which bid wins.

    Attributes:
        policy: A policy of the slot ``trading``; ``none`` balances nothing.
        parameters: The policy's parameters.
        reasons: For which of these sequences move; none for no moves but those that are ordered.
    """

    policy: Annotated[str, WIRED] = "none"
    parameters: Annotated[dict[str, Any], WIRED] = {}
    reasons: tuple[MoveReason, ...] = tuple(MoveReason)


class FenceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits that keep sequences from moving too often, or in vain.

    Attributes:
        cooldown_tokens: A sequence that has moved decodes so many tokens before it moves for balance, a boundary or
            memory again.
        cooldown_ms: And stays for so long at least.
        payback_factor: It must be expected to run for so many times as long as a move takes.
        decoded_min: Without a prediction a sequence moves for balance only after so many output tokens: long runs tend
            to continue.
        plan_pause_ms: No balance for so long after a new plan.
    """

    cooldown_tokens: Annotated[Count, CONSTANT] = 64
    cooldown_ms: Annotated[Count, CONSTANT] = 2_000
    payback_factor: Count = 10
    decoded_min: Annotated[Count, CONSTANT] = 64
    plan_pause_ms: Annotated[Count, CONSTANT] = 2_000


class MemoryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conditions under which sequences leave because memory would run short.

    Attributes:
        risk_max: Probability of needing more KV blocks than there are, above which a sequence is moved away.
        horizon_ms: Over so long, and at least over three times what a move takes: later there is time to ask later.
        join_risk_max: A hand-off, or a sequence that moves for balance or memory, is not taken where the probability
            exceeds this with it; 1 takes it wherever its blocks are idle.
        join_horizon_ms: Over so long: whoever comes stays for longer than a move takes.
    """

    risk_max: Share = 0.05
    horizon_ms: Annotated[Count, CONSTANT] = 0
    join_risk_max: Share = 1.0
    join_horizon_ms: Annotated[Count, CONSTANT] = 20_000


class BrokerLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds and rhythm of one instance's broker. Times in milliseconds.

    Attributes:
        tick_ms: How often intents are looked at.
        load_ms: How often the load is published.
        load_age_ms: A load that is older does not count; its instance is not asked.
        horizon_ms: Of the load curve.
        out_max: Sequences that are asked for or moved at a time; more where all leave (a drain, the role prefill)
            and the wire allows.
        boundary_ms: How often a boundary is refined and published.
    """

    tick_ms: Annotated[Span, CONSTANT] = 200
    load_ms: Annotated[Span, CONSTANT] = 500
    load_age_ms: Annotated[Span, CONSTANT] = 1_500
    horizon_ms: Annotated[Span, CONSTANT] = 8_000
    out_max: Span = 3
    boundary_ms: Annotated[Span, CONSTANT] = 1_000


class BrokerConfig(ProcessConfig, frozen=True, kw_only=True):
    """Configuration of a broker.

    Attributes:
        name: Unique name on the bus.
        instances: Instances that it acts for.
        step_times: Files of step-time parameters besides those that ship, by the name that instances give.
    """

    name: Annotated[str, WIRED] = "broker-0"
    instances: Annotated[list[str], WIRED]
    trading: TradingConfig = TradingConfig()
    fences: FenceConfig = FenceConfig()
    limits: BrokerLimits = BrokerLimits()
    memory: MemoryConfig = MemoryConfig()
    refinement: Annotated[RefinementParameters, CONSTANT] = RefinementParameters()
    step_times: Annotated[dict[str, str], WIRED] = {}


def trading_policy(config: TradingConfig) -> tuple[TradingPolicy, msgspec.Struct]:
    """The policy and its parameters. Raises ConfigError where there is no such policy, or a parameter is wrong."""
    return TRADING_POLICIES.choose(config.policy, config.parameters, table="trading.")
