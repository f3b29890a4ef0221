"""What decides which layers a verb installs: an `up` with modelled engines must not cost minutes for vLLM."""

import importlib.util
from types import ModuleType

import pytest

from tests.tidy.tree import ROOT


@pytest.fixture(scope="module")
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "setup/install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("words", "layers"),
    [
        (["up"], ["control", "cpu"]),
        (["up", "--", "--engine", "vllm"], ["control", "cpu"]),
        (["up", "--", "--engine", "modelled", "--instances", "64"], ["control"]),
        (["up", "--", "--engine=modelled"], ["control"]),
        (["up", "--", "--help"], ["control"]),
        (["test"], ["control", "dev", "cpu"]),
        (["test", "--", "-k", "broker"], ["control", "dev", "cpu"]),
        (["test", "--", "tests/unit", "tests/sim/test_x.py"], ["control", "dev"]),
        (["test", "--", "tests/unit", "tests/engine"], ["control", "dev", "cpu"]),
    ],
)
def test_a_verb_installs_what_it_needs_and_no_more(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, words: list[str], layers: list[str]
):
    monkeypatch.setenv("MILLRACE_ENGINE_EXTRA", "cpu")
    assert install._layers_for(["--for", *words]) == layers


def test_the_engine_layer_can_be_left_out(install: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MILLRACE_ENGINE_EXTRA", "none")
    assert install._layers_for(["--for", "test"]) == ["control", "dev"]


def test_an_unknown_engine_layer_is_refused_by_name(install: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MILLRACE_ENGINE_EXTRA", "tpu")
    with pytest.raises(SystemExit, match="tpu"):
        install._layers_for(["control", "engine"])
