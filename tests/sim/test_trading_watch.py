"""The checker of trading finds what it looks for: starvation, moves too close or too many, two asks at once."""

from types import SimpleNamespace
from typing import Any, cast

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
        fences = FenceConfig(cooldown_tokens=0, cooldown_ms=0, payback_factor=0)
        return msgspec.structs.replace(super()._broker(instance), fences=fences)


def test_brokers_without_a_cool_down_move_to_and_fro_and_are_found_to():
    shape = trading_shape(0, policy="eager", slow=True, plan_ns=SECOND // 2)
    with pytest.raises(SimulationFailed, match="moved again after"):
        SoakRun(0, shape=shape, faults=False, cluster=Hasty).run()


def _actor(name: str, snapshot: dict[str, Any]) -> Any:
    return SimpleNamespace(name=name, process=object(), actor=SimpleNamespace(snapshot=lambda: snapshot))


def test_two_open_asks_about_a_sequence_of_one_epoch_are_found():
    asks = {"out": {"feed": ["r0.0", "balance", "", "asking"]}}
    broker = _actor("b", {"instances": {"w0": asks, "w1": asks}})
    epochs = {"w0": {"r0.0": [3]}, "w1": {"r0.0": [4]}}
    workers = [_actor(name, {"sequences": held}) for name, held in epochs.items()]
    cluster: Any = SimpleNamespace(workers=workers, of_role=lambda role: [broker] if role is Role.BROKER else [])
    watch = TradingWatch(cluster, disturbed=lambda: True)
    watch.on_interval(SimpleNamespace(now_ns=2 * SECOND))  # type: ignore[arg-type]
    epochs["w1"]["r0.0"] = [3]
    with pytest.raises(AssertionError, match="two open asks"):
        watch.on_interval(SimpleNamespace(now_ns=3 * SECOND))  # type: ignore[arg-type]


def test_a_fourth_move_for_balance_is_found_whatever_came_between():
    watch = TradingWatch(cast(SoakCluster, None), disturbed=lambda: False)

    def moved(at_s: int, reason: MoveReason = MoveReason.BALANCE) -> None:
        ended = plain(MigrationFinished, sequence="r0.0", reason=reason)
        effects: list[Any] = [Publish(subject="migration.m.w0.w1", body=ended)]
        watch.on_handled(SimpleNamespace(now_ns=at_s * SECOND), None, effects)  # type: ignore[arg-type]

    for at_s in (10, 20, 30):
        moved(at_s)
    moved(31, MoveReason.DRAIN)
    with pytest.raises(AssertionError, match="was moved 4 times for balance"):
        moved(40)
