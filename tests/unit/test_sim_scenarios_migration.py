"""Scenarios whose sequences move or are traded: what is refused by name, and what each service is told."""

import msgspec
import pytest
from millrace.actor.config import BusConfig
from millrace.actor.errors import ConfigError
from millrace.contracts.broker import MoveReason
from millrace.contracts.kv import KvRefusal
from millrace.contracts.message import Message
from millrace.contracts.migration import MigrationFinished, MigrationOutcome
from millrace.contracts.plan import InstanceRole

from services.migrator.config import MigratorLimits
from services.worker.config import MigrationConfig
from simulator.scenarios.migration_spec import MigrationSpec
from simulator.scenarios.observer import Observer
from simulator.scenarios.reading import ScenarioError, scenario_of
from simulator.scenarios.trading_spec import TradingSpec
from tests.testbed.messages import plain

GROUPS = {"cluster": {"groups": [{"name": "front", "instances": 2}, {"name": "back", "instances": 11}]}}


@pytest.mark.parametrize(
    ("migration", "complaint"),
    [
        ({"bandwith_gbps": 100}, "bandwith_gbps"),
        ({"bandwidth_gbps": 0}, "Expected `float` > 0.0 .*bandwidth_gbps"),
        ({"roles": {"front": "prefil"}}, "prefil"),
        ({"copy": {"bytes_per_step": 1 << 20}}, "field `copy`.*removed: copies take no time"),
        ({"roles": {"middle": "decode"}}, "migration.roles: 'middle' is neither a group nor an instance"),
        ({"roles": {"back-0": "decode"}}, "'back-0' is neither"),
        ({"limits": {"freeze_ms": 0}}, "Expected `int` >= 1"),
    ],
)
def test_what_is_wrong_with_migration_is_named(migration: dict[str, object], complaint: str) -> None:
    with pytest.raises(ScenarioError, match=complaint):
        scenario_of({**GROUPS, "migration": migration})


def test_a_role_of_a_group_is_that_of_its_instances_and_an_instance_may_have_its_own() -> None:
    roles = {"back-03": "both", "front": "prefill", "back": "decode"}
    spec = scenario_of({**GROUPS, "migration": {"on": True, "roles": roles}})
    told = spec.migration.instance_roles(spec.instances())
    assert told["front-0"] is told["front-1"] is InstanceRole.PREFILL
    assert told["back-00"] is told["back-10"] is InstanceRole.DECODE
    assert told["back-03"] is InstanceRole.BOTH
    assert len(told) == 13


def test_instances_that_provisioning_may_add_get_the_role_of_their_group() -> None:
    provisioning = {"strategy": "relief", "parameters": {"instances_max": 15}}
    spec = scenario_of(
        {**GROUPS, "migration": {"on": True, "roles": {"front": "prefill"}}, "provisioning": provisioning}
    )
    assert sorted(spec.migration.instance_roles(spec.instances())) == ["front-0", "front-1", "front-2", "front-3"]


def test_workers_allow_what_the_migrators_limits_ask_for() -> None:
    told = MigrationSpec(limits=MigratorLimits(freeze_ms=5_000, copy_freeze_ms=100)).worker_bounds()
    assert told.freeze_ms_max == 5_000
    assert MigrationSpec().worker_bounds() == MigrationConfig()


def test_what_an_observer_notes_of_a_move_names_its_refusal() -> None:
    watching = Observer(name="observer", cluster="c", begin_ns=0, migrations=True)
    refused = plain(MigrationFinished, sequence="r1.0", outcome=MigrationOutcome.REFUSED, refusal=KvRefusal.NO_BLOCKS)
    watching.handle(Message(refused), 5)
    assert [each.outcome for each in watching.migrations] == ["refused no_blocks"]


def test_a_broker_is_configured_as_the_scenario_says():
    told = {"policy": "delay", "parameters": {"excess": 0.5}, "reasons": ["balance"], "fences": {"payback_factor": 2}}
    config = msgspec.convert(told, TradingSpec).broker(["i-3"], BusConfig(cluster="sim"))
    assert config.instances == ["i-3"]
    assert config.name == "broker-i-3"
    assert config.trading.reasons == (MoveReason.BALANCE,)
    assert config.fences.payback_factor == 2


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
