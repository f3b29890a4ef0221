"""Rules for the tree as a whole: a README where one is looked for, exact locks, nothing of one machine."""

import re
import tomllib
from pathlib import Path

import pytest

from setup.lock import BUILT_HERE
from tests.tidy.tree import ROOT, tracked_files

#: Paths that exist on somebody's machine only. Container files may name paths inside their image.
MACHINE_PATH = re.compile(r"(?<![\w.}-])/(?:root|home|Users|work)/\w+|/opt/(?:pypi|wheels)|/tmp/bash_\w+")
CONTAINER_FOLDERS = ("compose",)

PIN = re.compile(r"[a-z0-9][a-z0-9.-]*==[0-9][\w.]*")
HASHED_PIN = re.compile(PIN.pattern + r"( --hash=sha256:[0-9a-f]{64})+")

#: What git refuses comfortably and a reader never opens; the trained models are the largest files here.
FILE_BYTES_MAX = 25_000_000


def test_no_file_names_a_path_of_one_machine():
    found: list[str] = []
    for path in tracked_files():
        if path.parts[0] in CONTAINER_FOLDERS:
            continue
        text = (ROOT / path).read_bytes().decode("utf-8", errors="ignore")
        found.extend(f"{path}: {match.group()}" for match in MACHINE_PATH.finditer(text))
    assert not found, "\n".join(found)


def test_no_file_is_too_large():
    large = [str(path) for path in tracked_files() if (ROOT / path).stat().st_size > FILE_BYTES_MAX]
    assert not large, "\n".join(large)


def test_every_service_and_policy_has_a_readme():
    services = {Path(*path.parts[:2]) for path in tracked_files() if path.parts[0] == "services" and path.parts[2:]}
    policies = {path.parent for path in tracked_files() if path.name == "policy.py"}
    assert services
    assert policies
    missing = {folder / "README.md" for folder in services | policies} - set(tracked_files())
    assert not missing


@pytest.mark.parametrize(
    ("layer", "pin"), [("control", HASHED_PIN), ("dev", HASHED_PIN), ("cpu", HASHED_PIN), ("clients", PIN)]
)
def test_a_lock_holds_exact_versions_and_their_hashes(layer: str, pin: re.Pattern[str]):
    lines = [line for line in (ROOT / f"setup/locks/{layer}.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines
    assert [line for line in lines if not pin.fullmatch(line)] == []


def test_every_dependency_is_locked():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {"control": project["dependencies"], "dev": project["optional-dependencies"]["dev"]}
    control = _locked("control")
    missing = [
        f"{line} is not in setup/locks/{layer}.txt; run ./task lock"
        for layer, lines in wanted.items()
        for line in lines
        if _package(line) not in control | _locked(layer) | BUILT_HERE
    ]
    assert not missing, "\n".join(missing)


def _locked(layer: str) -> set[str]:
    return {_package(line) for line in (ROOT / f"setup/locks/{layer}.txt").read_text().splitlines() if "==" in line}


def _package(requirement: str) -> str:
    name = re.match(r"[\w.-]+", requirement)
    assert name, requirement
    return re.sub(r"[-_.]+", "-", name.group()).lower()


def test_classes_that_vllm_imports_by_name_exist():
    folder = ROOT / "services/worker/vllm_engine"
    named = re.findall(r"\{_PACKAGE\}\.(\w+)\.(\w+)", (folder / "startup.py").read_text())
    assert named
    missing = [name for module, name in named if f"class {name}(" not in (folder / f"{module}.py").read_text()]
    assert not missing
