"""Configuration of a cluster's brokers."""

import msgspec
import pytest
from millrace.cluster.spec import ClusterSpec
from millrace.supervision.service_fields import broker_fields

from services.broker.config import BrokerConfig


def spec(count: int = 3, **fields) -> ClusterSpec:
    model = {"name": "m", "path": "models/millrace-nano", "groups": [{"engine": "modelled", "count": count}]}
    return msgspec.convert({"models": [model]} | fields, ClusterSpec)


@pytest.mark.parametrize("policy", ["delay", "none"])
def test_the_policy_of_the_specification_is_the_brokers(policy):
    chosen = spec(policies={"trading": {"name": policy}})
    config = msgspec.convert(broker_fields(chosen, ["a", "b"]), BrokerConfig)
    assert config.instances == ["a", "b"]
    assert config.trading.policy == policy


def test_without_a_policy_nothing_moves_for_balance():
    assert msgspec.convert(broker_fields(spec(), ["a"]), BrokerConfig).trading.policy == "none"
