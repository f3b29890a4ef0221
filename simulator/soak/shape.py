"""Shape of a soak's cluster: how many actors, which engines, how sequences move."""

from __future__ import annotations

from typing import Any

import msgspec
from millrace.contracts.broker import MoveReason
from millrace.contracts.plan import InstanceRole
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_time_models import LinearStepTime
from millrace.enginemodel.tokens import OutputLengths
from millrace.sim.runtime_sim import MILLISECOND

from services.coordinator.config import StagesConfig

MODEL = "modelled"

#: Calls a second: from engines that are idle now and then to queues and preemptions.
RATES = (4.0, 12.0, 30.0)


#: KV replicas from an instance, and to one, at a time.
REPLICAS_OUT_MAX, REPLICAS_IN_MAX = 3, 4


class MigrationShape(msgspec.Struct, frozen=True, kw_only=True):
    """Migration of running sequences between the workers of a cluster.

    Attributes:
        verify: Whether checksums travel with the blocks. Without them a wrong read is a wrong token.
        roles: Of workers, by name or pattern.
        bytes_per_s: Of each worker's link, in each direction.
        latency_ns: Before the first byte of each read.
        replicas: Whether sequences have KV replicas elsewhere.
        asks_per_s: Average rate of orders to move a sequence.
    """

    verify: bool = True
    roles: dict[str, InstanceRole] = {}
    bytes_per_s: float = 12.5e9
    latency_ns: int = 30_000
    replicas: bool = False
    asks_per_s: float = 12.0


class TradingShape(msgspec.Struct, frozen=True, kw_only=True):
    """Trading of a cluster's sequences by brokers, and the interval between changes of its plan.

    Attributes:
        reasons: For which sequences move.
        cuts: Lengths at which stages may end, tokens.
        plan_ns: Between two plans; 0 for one plan that stays.
        stages_max: Most stages of a plan.
        wrong_estimates: Engines tell rests of their sequences that are wrong, or no numbers (wrong_estimates.py).
        growing: Long calls that the cluster gets when all harm is healed: they pass the boundaries.
    """

    policy: str = "delay"
    parameters: dict[str, Any] = {}
    reasons: tuple[MoveReason, ...] = tuple(MoveReason)
    cuts: tuple[int, ...] = (40, 90, 180)
    plan_ns: int = 2_000 * MILLISECOND
    stages_max: int = 3
    wrong_estimates: bool = False
    growing: int = 0


class SoakShape(msgspec.Struct, frozen=True, kw_only=True):
    """Size of a cluster and parameters of its engines.

    Attributes:
        predictors: Each serves every instance (replicas of each other); 0 for none, which leaves a policy that asks
            them to its fallback.
        restart_ns: A process that ended is started again after a time between these.
        rates: Calls a second, one of these for the whole run.
        max_tokens: Of a call, one of these.
        migration: A migrator for each worker, and how KV travels; None for neither.
        trading: A broker for each worker, and plans that change; None for neither. Needs ``migration``.
        stages: As in the coordinator's configuration.
        planned_as: Step-time set by which stages are planned, of those that ship; empty for none.
    """

    ingresses: int = 2
    workers: int = 3
    taggers: int = 1
    predictors: int = 0
    coordinators: int = 2
    engine: EngineParameters = EngineParameters(
        max_model_len=512, block_size=16, blocks_total=80, max_sequences=6, token_budget=96
    )
    step_time: LinearStepTime = LinearStepTime(fixed=8e6, per_decode=3e5, per_prefill_token=3e4)
    lengths: OutputLengths = OutputLengths(mean=40, sigma=0.8, length_max=250)
    rates: tuple[float, ...] = RATES
    max_tokens: tuple[int, ...] = (1, 5, 30, 120)
    policy: str = "join_shortest_queue"
    queue_max: int = 32
    calls_open_max: int = 200
    call_timeout_s: float = 60.0
    restart_ns: tuple[int, int] = (300 * MILLISECOND, 1500 * MILLISECOND)
    migration: MigrationShape | None = None
    trading: TradingShape | None = None
    stages: StagesConfig = StagesConfig()
    planned_as: str = ""
