"""Shape of a seed's cluster where brokers trade."""

from __future__ import annotations

from random import Random

import msgspec
from millrace.enginemodel.tokens import OutputLengths

from simulator.soak.migration_load import migration_for
from simulator.soak.shape import SoakShape, TradingShape

#: Trading policies that a seed may draw. One that forecasts costs several times the time of one that does not.
POLICIES = ("cascade", "cascade", "delay", "none")

#: Outputs long enough that some sequences pass two boundaries.
LENGTHS = OutputLengths(mean=120, sigma=0.8, length_max=380)


def trading_shape(
    seed: int, *, policy: str = "", plan_ns: int | None = None, wrong_estimates: bool = False
) -> SoakShape:
    """The cluster of a seed: four workers in up to three stages, and a new plan every two seconds.

    Args:
        policy: Trading policy; empty for one that the seed draws.
        plan_ns: Between two plans; None for two seconds.
        wrong_estimates: See TradingShape.
    """
    rng = Random(f"{seed}/trading shape")
    trading = TradingShape(policy=policy or rng.choice(POLICIES), wrong_estimates=wrong_estimates)
    if plan_ns is not None:
        trading = msgspec.structs.replace(trading, plan_ns=plan_ns)
    migration = msgspec.structs.replace(migration_for(seed), roles={})
    return SoakShape(workers=4, migration=migration, trading=trading, lengths=LENGTHS)
