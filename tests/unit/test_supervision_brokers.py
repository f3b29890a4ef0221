"""Brokers that a cluster's specification asks for, and what they are told."""

import msgspec
import pytest
from millrace.cluster.spec import ClusterSpec
from millrace.supervision.service_fields import broker_fields, broker_shares

from services.broker.config import BrokerConfig


def spec(count: int = 3, **fields) -> ClusterSpec:
    model = {"name": "m", "path": "models/millrace-nano", "groups": [{"engine": "modelled", "count": count}]}
    return msgspec.convert({"models": [model]} | fields, ClusterSpec)


def test_without_a_word_there_are_none():
    assert broker_shares(spec()) == []


def test_one_broker_acts_for_up_to_64_instances():
    shares = broker_shares(spec(130, services={"brokers": True}))
    assert [len(share) for share in shares] == [64, 64, 2]
    assert len({name for share in shares for name in share}) == 130


def test_there_are_none_where_nothing_can_move():
    assert broker_shares(spec(services={"brokers": True, "migrators": False})) == []


@pytest.mark.parametrize("policy", ["delay", "none"])
def test_the_policy_of_the_specification_is_the_brokers(policy):
    chosen = spec(services={"brokers": True}, policies={"trading": {"name": policy}})
    config = msgspec.convert(broker_fields(chosen, ["a", "b"]), BrokerConfig)
    assert config.instances == ["a", "b"]
    assert config.trading.policy == policy
