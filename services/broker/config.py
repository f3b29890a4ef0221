"""Configuration of the broker."""

from __future__ import annotations

from typing import Any

import msgspec
from millrace.actor.config import BusConfig, TelemetryConfig
from millrace.actor.errors import ConfigError
from millrace.contracts.broker import MoveReason
from millrace.policies.registry import PolicyError
from millrace.policies.stages.refinement import RefinementParameters
from millrace.policies.trading import TRADING_POLICIES, TradingPolicy


class TradingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for the trade of running sequences between instances.

    Attributes:
        policy: A name of ``TRADING_POLICIES``, a file or an entry point.
        parameters: The policy's parameters.
        reasons: For which of these sequences move; none for no moves at all.
        returns: For which of drain and balance queued sequences are handed back to their ingresses.
    """

    policy: str = "delay"
    parameters: dict[str, Any] = {}
    reasons: tuple[MoveReason, ...] = tuple(MoveReason)
    returns: tuple[MoveReason, ...] = (MoveReason.DRAIN,)

    def __post_init__(self) -> None:
        """Refuses what cannot be. Raises ValueError naming the field."""
        others = set(self.returns) - {MoveReason.DRAIN, MoveReason.BALANCE}
        if others:
            raise ValueError(f"returns may name drain and balance, names {', '.join(sorted(others))}")


class FenceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits that keep sequences from moving too often, or in vain.

    Attributes:
        cooldown_tokens: A sequence that has moved decodes so many tokens before it moves for balance or memory again.
        cooldown_ms: And stays for so long at least.
        cooldown_factor: And for so many times as long as its last move took,
        cooldown_ms_max: but no longer than this: nobody shall be past a boundary for five seconds beside idle room.
        balance_moves_max: Balance moves in a sequence's life.
        payback_factor: It must be expected to run for so many times as long as a move takes,
        payback_ms_max: unless it has stayed past its boundary for so long: a rest that short was predicted wrongly.
        hysteresis: A sequence leaves at the stage's boundary if it is predicted to exceed it by this factor, and
            without a prediction when it does; at least 1. Above 1 it saves moves and keeps more in the lower stage than
            planners and refinement, which know nothing of it, reckon with.
        decoded_min: Without a prediction a sequence moves for balance only after so many output tokens: who has run
            for long goes on for long.
        plan_pause_ms: No balance for so long after a new plan.
    """

    cooldown_tokens: int = 64
    cooldown_ms: int = 2_000
    cooldown_factor: int = 10
    cooldown_ms_max: int = 4_000
    balance_moves_max: int = 3
    payback_factor: int = 10
    payback_ms_max: int = 4_000
    hysteresis: float = 1.0
    decoded_min: int = 64
    plan_pause_ms: int = 2_000

    def __post_init__(self) -> None:
        """Refuses what cannot be. Raises ValueError naming the field."""
        for field in self.__struct_fields__:
            if field != "hysteresis" and getattr(self, field) < 0:
                raise ValueError(f"{field} must not be negative, is {getattr(self, field)}")
        if not 1 <= self.hysteresis < float("inf"):
            raise ValueError(f"hysteresis must be at least 1 and finite, is {self.hysteresis}")


class MemoryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conditions under which sequences leave because memory would run short.

    Attributes:
        risk_max: Probability of needing more KV blocks than there are, above which somebody is asked to leave.
        moves: Over so many times as long as a move takes: later there is time enough to ask later.
        horizon_ms: And over so long at least.
        join_risk_max: A hand-off, or a sequence that moves for balance or memory, is not taken where the probability
            exceeds this with it; 1 takes it wherever its blocks are idle.
        join_horizon_ms: Over so long: whoever comes stays for longer than a move takes.
    """

    risk_max: float = 0.05
    moves: int = 3
    horizon_ms: int = 0
    join_risk_max: float = 1.0
    join_horizon_ms: int = 20_000

    def __post_init__(self) -> None:
        """Refuses what cannot be. Raises ValueError naming the field."""
        if not 0 < self.risk_max <= 1:
            raise ValueError(f"risk_max must be above 0 and at most 1, is {self.risk_max}")
        if self.moves < 1:
            raise ValueError(f"moves must be at least 1, is {self.moves}")
        for field in ("horizon_ms", "join_horizon_ms"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} must not be negative, is {getattr(self, field)}")
        if not 0 < self.join_risk_max <= 1:
            raise ValueError(f"join_risk_max must be above 0 and at most 1, is {self.join_risk_max}")


class BrokerLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds and deadlines of one instance. Times in milliseconds.

    Attributes:
        tick_ms: How often intents are looked at.
        load_ms: How often the load is told.
        load_age_ms: A load that is older does not count; its instance is not asked.
        horizon_ms, points: Of the load curve.
        candidates_max: Instances that one ask goes to.
        asks_max: Asks and offers open at a time.
        ask_ms: How long bids are waited for.
        bid_ms: How long a bid holds.
        bids_max: Bids that hold at a time; beyond it the instance bids nothing.
        out_max, in_max: Transfers at a time, as the migrators' limits.
        out_queue_max, in_queue_max: Deals that wait for a slot, on each side.
        offer_ms: How long the answer to an offer or a grant is waited for.
        hold_ms: How long a deal may wait for its slot.
        start_ms: How long a granted slot waits for the transfer to start.
        starving_after: Grants that came to nothing before the next one keeps its slot.
        keep_ms: How long a kept slot waits.
        transfer_ms: How long a transfer may take.
        confirm_ms: The source of a transfer is asked so often whether it goes on: its end may have been lost.
        rest_ms, rest_ms_max: First and longest pause before a sequence that nobody took is offered again.
        balance_pause_ms: No further balance move for so long after one: loads must show it first.
        growth_blocks: Idle blocks wanted beyond those that a sequence has.
        boundary_ms: How often a boundary is refined and told.
    """

    tick_ms: int = 200
    load_ms: int = 500
    load_age_ms: int = 1_500
    horizon_ms: int = 8_000
    points: int = 16
    candidates_max: int = 6
    asks_max: int = 4
    ask_ms: int = 50
    bid_ms: int = 1_000
    bids_max: int = 64
    out_max: int = 3
    in_max: int = 3
    out_queue_max: int = 16
    in_queue_max: int = 16
    offer_ms: int = 300
    hold_ms: int = 5_000
    start_ms: int = 500
    starving_after: int = 3
    keep_ms: int = 2_000
    transfer_ms: int = 30_000
    confirm_ms: int = 1_000
    rest_ms: int = 500
    rest_ms_max: int = 4_000
    balance_pause_ms: int = 1_000
    growth_blocks: int = 4
    boundary_ms: int = 1_000

    def __post_init__(self) -> None:
        """Refuses what cannot be. Raises ValueError naming the field."""
        for field in self.__struct_fields__:
            least = 2 if field == "points" else 0 if field in ("growth_blocks", "balance_pause_ms") else 1
            if getattr(self, field) < least:
                raise ValueError(f"{field} must be at least {least}, is {getattr(self, field)}")


class BrokerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of a broker process.

    Attributes:
        name: Unique name on the bus.
        instances: Instances that it acts for.
        rest_default_tokens: Output length that a forecast assumes where none was predicted.
        step_times: Files of step-time parameters besides those that ship, by the name that instances give.
        record: File for the actor's inbox and effects, for ``millrace replay``; empty for none.
    """

    name: str = "broker-0"
    instances: list[str]
    trading: TradingConfig = TradingConfig()
    fences: FenceConfig = FenceConfig()
    limits: BrokerLimits = BrokerLimits()
    memory: MemoryConfig = MemoryConfig()
    refinement: RefinementParameters = RefinementParameters()
    rest_default_tokens: int = 128
    step_times: dict[str, str] = {}
    bus: BusConfig = BusConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    record: str = ""


def trading_policy(config: TradingConfig) -> tuple[TradingPolicy, msgspec.Struct]:
    """The policy and its parameters. Raises ConfigError where there is no such policy, or a parameter is wrong."""
    try:
        return TRADING_POLICIES.choose(config.policy, config.parameters)
    except PolicyError as error:
        raise ConfigError(f"trading.{error}") from None
