"""The checker of trading finds what it looks for: starvation, moves too close or too many, two asks about one
sequence, asks that stay open.
"""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from millrace.actor.effects import Publish
from millrace.contracts.broker import MoveReason
from millrace.contracts.catalog import Role
from millrace.contracts.migration import MigrationFinished
from millrace.sim.failure import SimulationFailed
from millrace.sim.runtime_sim import SECOND

from services.broker.config import BrokerConfig, FenceConfig
from simulator.soak.cluster import SoakCluster
from simulator.soak.run import SoakRun
from simulator.soak.trading import trading_shape
from simulator.soak.trading_watch import TradingWatch
from tests.testbed.messages import plain


def test_a_cluster_that_hands_nothing_on_starves_and_is_found_to():
    shape = trading_shape(0, policy="eager", plan_ns=0, slow=True)
    trading = msgspec.structs.replace(shape.trading, reasons=(MoveReason.DRAIN, MoveReason.BALANCE))
    without = msgspec.structs.replace(shape, trading=trading)
    with pytest.raises(SimulationFailed, match="past their boundary beside idle room"):
        SoakRun(0, shape=without, faults=False).run()


class Hasty(SoakCluster):
    """Brokers without a cool-down."""

    def _broker(self, instance: str) -> BrokerConfig:
        fences = FenceConfig(cooldown_tokens=0, cooldown_ms=0, payback_factor=0, hysteresis=1.0)
        return msgspec.structs.replace(super()._broker(instance), fences=fences)


def test_brokers_without_a_cool_down_move_to_and_fro_and_are_found_to():
    shape = trading_shape(0, policy="eager", slow=True, plan_ns=SECOND // 2)
    with pytest.raises(SimulationFailed, match="moved again after"):
        SoakRun(0, shape=shape, faults=False, cluster=Hasty).run()


class Watched:
    """A watch over brokers and workers that say what they are told to."""

    def __init__(self) -> None:
        self.disturbed = False
        self.now_ns = SECOND
        self.owns: dict[str, dict[str, Any]] = {}
        self.held: dict[str, dict[str, list[Any]]] = {}
        workers = [_actor(name, lambda name=name: {"sequences": self.held.get(name, {})}) for name in ("w0", "w1")]
        brokers = [_actor("b", lambda: {"instances": {name: self._own(name) for name in ("w0", "w1")}})]
        self.engines = {name: SimpleNamespace(engine=SimpleNamespace(scheduler=_IDLE)) for name in ("w0", "w1")}
        cluster: Any = SimpleNamespace(
            workers=workers, engines=self.engines, of_role=lambda role: brokers if role is Role.BROKER else []
        )
        self.watch = TradingWatch(cluster, disturbed=lambda: self.disturbed)

    def _own(self, name: str) -> dict[str, Any]:
        nothing = {"out": {}, "in": {}, "bids": 0, "resting": 0, "boundary": None, "above": []}
        return nothing | self.owns.get(name, {})

    def look(self) -> None:
        self.now_ns += SECOND
        self.watch.on_interval(SimpleNamespace(now_ns=self.now_ns))  # type: ignore[arg-type]

    def moved(self, *, reason: MoveReason = MoveReason.BALANCE, after_ns: int = 0) -> None:
        self.now_ns += after_ns
        ended = plain(MigrationFinished, sequence="r0.0", reason=reason)
        effects: list[Any] = [Publish(subject="migration.m.w0.w1", body=ended)]
        self.watch.on_handled(SimpleNamespace(now_ns=self.now_ns), None, effects)  # type: ignore[arg-type]


_IDLE = SimpleNamespace(running=[])


def _actor(name: str, snapshot: Any) -> Any:
    return SimpleNamespace(name=name, process=object(), actor=SimpleNamespace(snapshot=snapshot))


def asking(sequence: str) -> dict[str, Any]:
    return {"out": {"feed": [sequence, "balance", "", "asking"]}}


@pytest.mark.parametrize("disturbed", [False, True])
def test_two_open_asks_about_a_sequence_of_one_epoch_are_found(disturbed: bool):
    watched = Watched()
    watched.disturbed = disturbed
    watched.owns = {"w0": asking("r0.0"), "w1": asking("r0.0")}
    watched.held = {"w0": {"r0.0": [3, 10, ""]}, "w1": {"r0.0": [4, 10, ""]}}
    watched.look()
    watched.held["w1"] = {"r0.0": [3, 10, ""]}
    with pytest.raises(AssertionError, match="two open asks"):
        watched.look()


def test_a_fourth_move_for_balance_is_found_whatever_came_between():
    watched = Watched()
    for _ in range(3):
        watched.moved(after_ns=9 * SECOND)
    watched.moved(reason=MoveReason.DRAIN)
    with pytest.raises(AssertionError, match="was moved 4 times for balance"):
        watched.moved(after_ns=9 * SECOND)
