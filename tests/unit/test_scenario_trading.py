"""Trading in a scenario: what it says reaches its brokers, or is refused by name."""

import msgspec
import pytest
from millrace.actor.config import BusConfig
from millrace.actor.errors import ConfigError
from millrace.contracts.broker import MoveReason

from simulator.scenarios.migration_spec import MigrationSpec
from simulator.scenarios.trading_spec import TradingSpec


def test_a_broker_is_configured_as_the_scenario_says():
    told = {"policy": "delay", "parameters": {"excess": 0.5}, "reasons": ["balance"], "fences": {"hysteresis": 2.0}}
    config = msgspec.convert(told, TradingSpec).broker(["i-3"], BusConfig(cluster="sim"))
    assert config.instances == ["i-3"]
    assert config.name == "broker-i-3"
    assert config.trading.reasons == (MoveReason.BALANCE,)
    assert config.fences.hysteresis == 2.0


def test_instances_of_a_host_share_a_broker_and_a_migrator():
    names, bus = ["i-3", "i-4"], BusConfig(cluster="sim")
    broker, migrator = TradingSpec().broker(names, bus), MigrationSpec().migrator(names, bus)
    assert (broker.name, broker.instances) == ("broker-i-3", names)
    assert (migrator.name, migrator.instances) == ("migrator-i-3", names)


@pytest.mark.parametrize(
    ("told", "named"),
    [({"policy": "barter"}, "barter"), ({"policy": "delay", "parameters": {"excess": -1.0}}, "excess")],
)
def test_a_policy_or_parameter_that_is_none_is_refused_by_name(told, named):
    with pytest.raises(ConfigError, match=named):
        msgspec.convert(told, TradingSpec).broker(["i-3"], BusConfig(cluster="sim"))
