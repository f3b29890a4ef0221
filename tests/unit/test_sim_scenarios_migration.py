"""Scenarios whose sequences move: what is refused by name, who gets which role, what is heard and told."""

import argparse
from io import StringIO

import msgspec
import pytest
from millrace.actor.effects import Subscribe
from millrace.cli.errors import CliError
from millrace.contracts.broker import MoveReason
from millrace.contracts.kv import KvRefusal
from millrace.contracts.message import Message
from millrace.contracts.migration import MigrationCost, MigrationFinished, MigrationOutcome
from millrace.contracts.plan import InstanceRole
from rich.console import Console

from services.migrator.config import MigratorLimits
from services.worker.config import MigrationConfig
from simulator.commands import sim
from simulator.scenarios.migration_spec import MigrationSpec
from simulator.scenarios.observer import Observer
from simulator.scenarios.reading import ScenarioError, scenario_of
from simulator.scenarios.running import ScenarioOutcome
from simulator.scenarios.statistics import summarise
from simulator.scenarios.tables import run_tables
from tests.testbed.messages import plain

GROUPS = {"cluster": {"groups": [{"name": "front", "instances": 2}, {"name": "back", "instances": 11}]}}

COST = MigrationCost(tokens=300, bytes=4096, rounds=1, frozen_ns=2_000_000, duration_ns=9_000_000)
ROUTE = {"source": "front-0", "target": "back-00", "reason": MoveReason.HANDOFF}
FINISHED = plain(MigrationFinished, sequence="r1.0", model="modelled", cost=COST, **ROUTE)


@pytest.mark.parametrize(
    ("migration", "complaint"),
    [
        ({"bandwith_gbps": 100}, "bandwith_gbps"),
        ({"bandwidth_gbps": 0}, "Expected `float` > 0.0 .*bandwidth_gbps"),
        ({"latency_us": -1.0}, "latency_us"),
        ({"token_bytes": 0}, "Expected `int` >= 1 .*token_bytes"),
        ({"roles": {"front": "prefil"}}, "prefil"),
        ({"copy": {"bytes_per_step": 1 << 20}}, "field `copy`.*removed: copies take no time"),
        ({"roles": {"middle": "decode"}}, "migration.roles: 'middle' is neither a group nor an instance"),
        ({"roles": {"back-0": "decode"}}, "'back-0' is neither"),
        ({"limits": {"freeze_ms": 0}}, "Expected `int` >= 1"),
        ({"limits": {"freez_ms": 9}}, "freez_ms"),
        ({"mode": "by_mail"}, "by_mail"),
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


# What is heard and told


def observer(*, migrations: bool) -> Observer:
    return Observer(name="observer", cluster="c", begin_ns=1_000, migrations=migrations)


def test_migrations_are_listened_to_only_where_there_are_any() -> None:
    def heard(watching: Observer) -> list[str]:
        return [effect.subject for effect in watching.start(0) if isinstance(effect, Subscribe)]

    assert [subject.split(".")[2] for subject in heard(observer(migrations=True))] == ["outcome", "migration"]
    assert len(heard(observer(migrations=False))) == 1


def test_migrations_are_told_by_outcome_and_frozen_time_of_those_that_moved() -> None:
    watching = observer(migrations=True)
    refused = msgspec.structs.replace(
        FINISHED, outcome=MigrationOutcome.REFUSED, refusal=KvRefusal.NO_BLOCKS, cost=MigrationCost()
    )
    for body in (FINISHED, refused, FINISHED):
        watching.handle(Message(body), 5_000)
    assert watching.snapshot()["migrations"] == 3
    outcome = ScenarioOutcome(
        spec=scenario_of({}),
        trace_hash=0,
        messages=0,
        wall_s=0.0,
        virtual_s=1.0,
        outcomes={},
        details={},
        fallbacks=0,
        engine_steps=0,
        finished=[],
        samples=[],
        migrations=watching.migrations,
    )
    summary = summarise(outcome)
    assert summary.migrations == {"moved": 2, "refused no_blocks": 1}
    assert summary.frozen_s.p50 == summary.frozen_s.largest == 0.002

    printed = StringIO()
    Console(width=120, file=printed).print(run_tables(outcome, summary))
    text = printed.getvalue()
    assert "frozen, ms" in text
    assert "2 moved, 1 refused no_blocks" in text


def test_random_migrations_are_refused_with_a_scenario() -> None:
    parser = argparse.ArgumentParser()
    sim.add_arguments(parser)
    with pytest.raises(CliError, match=r"--set migration\.on=true"):
        sim.run(parser.parse_args(["--scenario", "any.toml", "--migrations"]))
