"""Trading in a scenario: what it says reaches its brokers, or is refused by name."""

import msgspec
import pytest
from millrace.actor.config import BusConfig
from millrace.actor.errors import ConfigError
from millrace.contracts.broker import MoveReason

from simulator.scenarios.trading_spec import TradingSpec


def test_a_broker_is_configured_as_the_scenario_says():
    told = {"policy": "cascade", "parameters": {"excess": 0.5}, "reasons": ["balance"], "fences": {"hysteresis": 2.0}}
    config = msgspec.convert(told, TradingSpec).broker("i-3", BusConfig(cluster="sim"))
    assert config.instances == ["i-3"]
    assert config.name == "broker-i-3"
    assert config.trading.reasons == (MoveReason.BALANCE,)
    assert config.fences.hysteresis == 2.0


@pytest.mark.parametrize(
    ("told", "named"),
    [({"policy": "barter"}, "barter"), ({"policy": "delay", "parameters": {"excess": -1.0}}, "excess")],
)
def test_a_policy_or_parameter_that_is_none_is_refused_by_name(told, named):
    with pytest.raises(ConfigError, match=named):
        msgspec.convert(told, TradingSpec).broker("i-3", BusConfig(cluster="sim"))
