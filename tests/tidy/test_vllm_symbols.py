"""vllm_symbols.txt names what Millrace imports of vLLM, and the vLLM that is installed has all of it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from millrace.cli.machine_report import VLLM_KNOWN

from setup.check_vllm import VllmSource, compare, installed_source, unlisted

RELEASE = {
    "/__init__.py": "from .one import Parent",
    "/one.py": "class Parent:\n    def go(self, *, fast=False): self.speed = 3",
    "/two/__init__.py": "if True:\n    from vllm import Parent as Base\nclass Child(Base):\n    size: int = 1",
}


def test_the_installed_vllm_has_every_symbol_and_each_import_is_named() -> None:
    try:
        source = installed_source()
    except StopIteration:
        pytest.skip("no vLLM is installed")
    assert compare(source, source) == ([], [])
    assert unlisted() == []


def test_doctor_knows_the_versions_that_the_package_allows() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (allowed,) = (line for line in project["optional-dependencies"]["gpu"] if line.startswith("vllm"))
    first, last = min(VLLM_KNOWN), max(VLLM_KNOWN)
    assert allowed == f"vllm>={first},<0.{int(last.split('.')[1]) + 1}"


@pytest.mark.parametrize(
    ("symbol", "missing"),
    [
        ("Child.go(fast)", ""),
        ("Child.speed", ""),
        ("Child(size)", ""),
        ("Base.go(slow)", "vllm.two.Base.go takes no slow"),
        ("Child.stop", "vllm.two.Child has no stop"),
        ("Other", "vllm.two has no Other"),
    ],
)
def test_what_a_release_has_is_found_where_it_was_imported_from_or_inherited(symbol: str, missing: str) -> None:
    found = VllmSource(RELEASE.get).resolve("vllm.two", symbol)
    assert found == missing if missing else not isinstance(found, str)
