"""Installation by a verb: no more than it needs (vLLM costs minutes), and the native module where it can be built."""

import importlib.util
from pathlib import Path
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


def test_the_engine_layer_can_be_left_out_and_an_unknown_one_is_refused(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MILLRACE_ENGINE_EXTRA", "none")
    assert install._layers_for(["--for", "test"]) == ["control", "dev"]
    monkeypatch.setenv("MILLRACE_ENGINE_EXTRA", "tpu")
    with pytest.raises(SystemExit, match="tpu"):
        install._layers_for(["control", "engine"])


def test_without_a_compiler_set_up_ends_and_says_what_to_install(install: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(install.SystemPartMissing, match="apt-get install g"):
        install._install_native()


def test_the_native_module_is_built_again_when_its_sources_or_the_compiler_change(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    built: list[str] = []
    (tmp_path / "native").mkdir()
    (tmp_path / "stamps").mkdir()
    source = tmp_path / "native/source.cpp"
    for name, value in (("ROOT", tmp_path), ("NATIVE", tmp_path / "native"), ("STAMPS", tmp_path / "stamps")):
        monkeypatch.setattr(install, name, value)
    monkeypatch.setattr(install, "_install_native", lambda: built.append(source.read_text()))
    for text, compiler in (("one", "c++"), ("one", "c++"), ("two", "c++"), ("two", "clang++")):
        source.write_text(text)
        monkeypatch.setattr(install, "_compiler", lambda found=compiler: found)
        install._build_native()
    assert built == ["one", "two", "two"]
