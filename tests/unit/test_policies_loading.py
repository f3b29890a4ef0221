"""Policies from files: what makes a file one, what is refused and how that is said, and where paths are looked for."""

from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
from millrace.policies.dispatch import DISPATCH_POLICIES, DispatchView, InstanceView, Prediction
from millrace.policies.provisioning import PROVISIONING_POLICIES
from millrace.policies.registry import Nothing, PolicyError, Registry
from millrace.policies.roles import ROLE_POLICIES
from millrace.policies.stages import STAGE_POLICIES, PlanningView
from millrace.policies.trading import TRADING_POLICIES

from services.ingress.config import DispatchConfig, dispatch_policy
from simulator.scenarios.reading import read_scenario
from simulator.scenarios.sweeping import variants

EXAMPLE = Path(__file__).parents[2] / "examples" / "policy" / "considerate.py"
FIRST = """
from millrace.policies.dispatch.pick import pick_index

def decide(view, parameters, state, now_ns, rng):
    return pick_index(view, 0, "always the first"), state
"""


def written(folder: Path, text: str, name: str = "first.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def view(**predictions: Prediction) -> DispatchView:
    candidates = tuple(InstanceView(name=name) for name in ("a", "b", "c"))
    return DispatchView(model="m", sequences=1, length_tokens=9, candidates=candidates, predictions=predictions)


def test_a_function_in_a_file_is_a_policy(tmp_path: Path) -> None:
    policy = DISPATCH_POLICIES.load(written(tmp_path, FIRST))
    assert (policy.name, policy.ask, policy.needs_length) == ("first", None, False)
    decision, _ = policy.decide(view(), policy.parameters(), policy.initial_state, 0, Random(0))
    assert (decision.chosen, decision.reason) == ("a", "always the first")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x = 1", "has no function decide"),
        ("decide = 7", "has no function decide"),
        ("def decide(:", r"first\.py:1: SyntaxError"),
        ("\nimport no_such_module_here", r"first\.py:2: ModuleNotFoundError.*no_such_module_here"),
        ("Parameters = 3\n" + FIRST, "Parameters must be a msgspec.Struct"),
        ("import msgspec\nclass Parameters(msgspec.Struct):\n    d: int\n" + FIRST, "every field of Parameters needs"),
        ("import msgspec\nclass State(msgspec.Struct):\n    turn: int\n" + FIRST, "every field of State needs"),
        ("def ask(view, parameters, rng): return ()\n" + FIRST, "Parameters must extend .*QueryParameters"),
    ],
)
def test_a_file_that_is_no_policy_is_refused_by_name(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(PolicyError, match=complaint) as refused:
        DISPATCH_POLICIES.load(written(tmp_path, text))
    assert "first.py" in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"absent\.py: no such file"):
        DISPATCH_POLICIES.load(str(tmp_path / "absent.py"))


def test_a_file_may_not_take_the_name_of_one_that_ships(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="a policy random ships already"):
        DISPATCH_POLICIES.load(written(tmp_path, FIRST, "random.py"))


@pytest.mark.parametrize(
    ("registry", "functions", "default"),
    [
        (STAGE_POLICIES, "decide", ("learns", False)),
        (ROLE_POLICIES, "decide", ("observes", True)),
        (PROVISIONING_POLICIES, "decide", ("initial_state", Nothing())),
        (TRADING_POLICIES, "trigger burden pick", ("needs_forecast", False)),
    ],
)
def test_every_slot_takes_a_file(
    registry: Registry[Any], functions: str, default: tuple[str, object], tmp_path: Path
) -> None:
    text = "\n".join(f"def {name}(*given): return given" for name in functions.split())
    policy, parameters = registry.choose(written(tmp_path, text), {})
    assert (policy.name, parameters) == ("first", Nothing())
    assert getattr(policy, default[0]) == default[1]
    assert getattr(policy, functions.split(maxsplit=1)[0])(1, 2) == (1, 2)
    with pytest.raises(PolicyError, match=r"second\.py: it has no function"):
        registry.load(written(tmp_path, "", "second.py"))


def test_a_file_may_say_its_name_and_use_its_own_classes_in_annotations(tmp_path: Path) -> None:
    text = """
from __future__ import annotations
import msgspec
name = "mine"
class Inner(msgspec.Struct, forbid_unknown_fields=True):
    x: int = 1
class Parameters(msgspec.Struct):
    inner: Inner = msgspec.field(default_factory=Inner)
def decide(view, parameters): return parameters.inner.x
"""
    policy, parameters = STAGE_POLICIES.choose(written(tmp_path, text), {"inner": {"x": 7}})
    assert (policy.name, policy.decide(cast(PlanningView, None), parameters)) == ("mine", 7)
    with pytest.raises(PolicyError, match=r"parameters of mine: .*unknown field `y`"):
        STAGE_POLICIES.choose(written(tmp_path, text), {"inner": {"y": 7}})


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with entry points of two policies, of which one is no module."""
    (tmp_path / "somebodys_stages.py").write_text("def decide(view, parameters): return 7")
    metadata = tmp_path / "somebodys-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys\nVersion: 1.0\n")
    points = "half = somebodys_stages\nwrong = somebodys_stages:decide\nabsent = no_such_module_here\n"
    (metadata / "entry_points.txt").write_text("[millrace.policies.stages]\n" + points)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("installed")
def test_an_entry_point_of_an_installed_package_is_a_policy() -> None:
    policy = STAGE_POLICIES.load("half")
    assert (policy.name, policy.decide(cast(PlanningView, None), None)) == ("half", 7)
    with pytest.raises(PolicyError, match=r"no entry point of millrace\.policies\.roles"):
        ROLE_POLICIES.load("half")
    with pytest.raises(PolicyError, match="entry point wrong, somebodys_stages:decide: it must name a module"):
        STAGE_POLICIES.load("wrong")
    with pytest.raises(PolicyError, match=r"entry point absent, .*ModuleNotFoundError"):
        STAGE_POLICIES.load("absent")


def test_ingress_takes_a_file_and_its_parameters() -> None:
    config = DispatchConfig(policy=str(EXAMPLE), parameters={"slack": 0.5})
    policy, parameters = dispatch_policy(config)
    assert (policy.name, policy.needs_length) == ("considerate", True)
    assert getattr(parameters, "slack", None) == 0.5


def test_a_scenario_finds_a_policy_beside_itself(tmp_path: Path) -> None:
    written(tmp_path, FIRST)
    scenario = tmp_path / "scenario.toml"
    scenario.write_text('[dispatch]\npolicy = "first.py"\n')
    assert read_scenario(scenario).dispatch.policy == str(tmp_path / "first.py")
    assert [variant.label for variant in variants(scenario, (), ("dispatch.policy=random,first.py",), 1)] == [
        "random",
        "first",
    ]


@pytest.mark.parametrize(
    "predictions",
    [
        pytest.param(
            {
                "a": Prediction("a", ttft_ns=10, e2e_ns=1000, others_delay_ns=900),
                "b": Prediction("b", ttft_ns=10, e2e_ns=1099, others_delay_ns=100),
                "c": Prediction("c", ttft_ns=10, e2e_ns=1200, others_delay_ns=0),
            },
            id="spares others among those that end nearly as soon",
        ),
        pytest.param(
            {
                "a": Prediction("a", ttft_ns=500, e2e_ns=1000, placed_since=1),
                "b": Prediction("b", ttft_ns=500, e2e_ns=1300, others_delay_ns=50),
            },
            id="counts what was placed after the question",
        ),
    ],
)
def test_the_example_chooses(predictions: dict[str, Prediction]) -> None:
    policy = DISPATCH_POLICIES.load(str(EXAMPLE))
    decision, _ = policy.decide(view(**predictions), policy.parameters(), policy.initial_state, 0, Random(0))
    assert decision.chosen == "b"
