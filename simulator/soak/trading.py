"""Shape of a seed's cluster where brokers trade."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
from millrace.enginemodel.step_time_models import LinearStepTime
from millrace.enginemodel.tokens import OutputLengths
from millrace.sim.runtime_sim import SECOND

from simulator.soak.migration_load import migration_for
from simulator.soak.shape import SoakShape, TradingShape

#: Trading policies that a seed may draw, with their parameters; ``eager`` moves at once and for any gain.
EAGER = ("delay", {"persistence_ms": 0, "margin_ms": 0, "margin_share": 0.0})
POLICIES: tuple[tuple[str, dict[str, Any]], ...] = (EAGER, EAGER, ("delay", {}), ("none", {}))

#: Between two plans.
PLAN_NS = 2 * SECOND

#: Outputs long enough that some sequences pass two boundaries.
LENGTHS = OutputLengths(mean=120, sigma=0.8, length_max=380)

#: Of the slow half of the seeds: many sequences run for ten seconds, so that one which is not handed on at its boundary
#: is past it for longer than the five seconds that the checker allows (trading_watch.py).
SLOW_LENGTHS = OutputLengths(mean=260, sigma=0.7, length_max=400)
SLOW_STEPS = LinearStepTime(fixed=25e6, per_decode=3e5, per_prefill_token=3e4)
SLOW_MAX_TOKENS = (1, 5, 30, 120, 400, 400)
SLOW_RATES = (2.0, 6.0)

#: Between two of their plans: within a long one nothing but a hand-over can end that somebody is past its boundary.
SLOW_PLANS_NS = (2 * SECOND, 12 * SECOND)

#: Calls of the longest kind, when all harm is healed.
GROWING = 6

#: Dispatch policy and calls a second of a cluster that is to balance: loads differ, and there is room to move to.
UNEVEN, UNEVEN_RATES = "random", (4.0, 8.0, 12.0)


def trading_shape(
    seed: int,
    *,
    policy: str = "",
    plan_ns: int | None = None,
    slow: bool | None = None,
    wrong_estimates: bool = False,
    balance: bool = False,
) -> SoakShape:
    """The cluster of a seed: four workers in up to three stages, and a new plan every two seconds.

    Args:
        policy: Trading policy, or ``eager``; empty for one that the seed draws.
        plan_ns: Between two plans; 0 for one that stays, None for two seconds (of a slow seed sometimes longer).
        slow: Engines are slow and sequences long; None for what the seed draws.
        wrong_estimates: See TradingShape.
        balance: One stage of slow engines, requests placed at random and a policy that moves for any gain: most moves
            are for balance.
    """
    if balance:
        shape = trading_shape(seed, policy="eager", plan_ns=0, slow=True, wrong_estimates=wrong_estimates)
        assert shape.trading is not None
        trading = msgspec.structs.replace(shape.trading, stages_max=1, growing=0)
        return msgspec.structs.replace(shape, policy=UNEVEN, rates=UNEVEN_RATES, trading=trading)
    rng, pace = Random(f"{seed}/trading shape"), Random(f"{seed}/trading pace")
    drawn, slow_plan_ns = pace.random() < 0.5, pace.choice(SLOW_PLANS_NS)
    slow = drawn if slow is None else slow
    chosen, parameters = rng.choice(POLICIES) if not policy else EAGER if policy == "eager" else (policy, {})
    trading = TradingShape(
        policy=chosen,
        parameters=parameters,
        wrong_estimates=wrong_estimates,
        plan_ns=plan_ns if plan_ns is not None else slow_plan_ns if slow else PLAN_NS,
        growing=GROWING if slow else 0,
    )
    migration = msgspec.structs.replace(migration_for(seed), roles={})
    shape = SoakShape(workers=4, migration=migration, trading=trading, lengths=LENGTHS)
    return _slowed(shape) if slow else shape


def _slowed(shape: SoakShape) -> SoakShape:
    return msgspec.structs.replace(
        shape, lengths=SLOW_LENGTHS, step_time=SLOW_STEPS, max_tokens=SLOW_MAX_TOKENS, rates=SLOW_RATES
    )
