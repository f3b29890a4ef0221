"""A modelled engine in virtual time: what stands behind a simulated worker.

Each incarnation of the actor gets one of its own, which ends with it: its ``handlers()`` are those of the actor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from millrace.actor.engine import (
    SIGN_OVERDUE_NS,
    AddToEngine,
    CancelInEngine,
    EngineLiveness,
    KvCommand,
    LimitStepInEngine,
)
from millrace.enginemodel.engine import ModelledEngine
from millrace.enginemodel.pacing import PacedEngine
from millrace.sim.kv_network import SimKvNetwork
from millrace.sim.process import Handlers, SimProcess

#: Snapshots come at most so often, as from live engines: one with every step would cost more than all else.
SNAPSHOT_INTERVAL_NS = 20_000_000


class SimulatedEngine:
    """Carries out the engine effects of one incarnation of a worker actor."""

    def __init__(
        self,
        process: SimProcess,
        engine: ModelledEngine,
        *,
        snapshot_interval_ns: int = SNAPSHOT_INTERVAL_NS,
        run_ns_max: int = 0,
        network: SimKvNetwork | None = None,
    ) -> None:
        """Args:
        run_ns_max: Longest run of decode steps that is computed at once; 0 for step by step.
        network: Carries KV between engines that were built with an endpoint.
        """
        self.engine = engine
        self._process = process
        self._hangs_until_ns = 0
        self._silent = False
        self.paced = PacedEngine(
            engine,
            _VirtualClock(process),
            process.deliver,
            snapshot_interval_ns=snapshot_interval_ns,
            run_ns_max=run_ns_max,
        )
        port = network.attach(process, engine) if network is not None else None
        if port is not None:
            self.paced.connect(port)

    def handlers(self) -> Handlers:
        return {
            AddToEngine: lambda effect: self.paced.add(effect.sequence),
            CancelInEngine: lambda effect: self.paced.cancel(effect.sequences),
            LimitStepInEngine: lambda effect: self.paced.limit_step(effect.tokens),
            **dict.fromkeys(get_args(KvCommand), self.paced.move),
        }

    def fail(self, detail: str = "killed by the scenario") -> None:
        """The engine dies under its worker, which hears EngineFailed."""
        self.paced.fail(detail)

    def stall(self, duration_ns: int) -> None:
        """The engine hangs: no step ends for this long, and no sign of life comes."""
        self.paced.stall(duration_ns)
        clock, began_ns = _VirtualClock(self._process), self._process.now_ns
        self._hangs_until_ns = max(self._hangs_until_ns, began_ns + duration_ns)
        clock.at(began_ns + SIGN_OVERDUE_NS, lambda: self._tell_liveness(began_ns))
        clock.at(began_ns + duration_ns, lambda: self._tell_liveness(0))

    def _tell_liveness(self, since_ns: int) -> None:
        """Tells what changed: ``since_ns`` is when the hang began, 0 where it may have ended."""
        silent = self._process.now_ns < self._hangs_until_ns
        if silent != (since_ns > 0) or silent == self._silent:
            return
        self._silent = silent
        self._process.deliver(EngineLiveness(silent_since_ns=since_ns, step_since_ns=0))


class _VirtualClock:
    """The simulation's time; what was to come is forgotten when the process ends."""

    def __init__(self, process: SimProcess) -> None:
        self._process = process
        self._queue = process.simulation.queue

    def now_ns(self) -> int:
        return self._queue.now_ns

    def at(self, time_ns: int, callback: Callable[[], None]) -> None:
        self._queue.at(time_ns, self._call, callback)

    def _call(self, callback: Callable[[], None]) -> None:
        if self._process.alive:
            callback()
