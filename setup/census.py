"""Counts the repository: lines by kind, configuration keys, wire types, metrics, decisions, words, options of up.

python -m setup.census [--json]

It only prints; no number is a limit.
"""

import argparse
import json
import subprocess
from collections.abc import Iterable
from pathlib import Path

from millrace.cli import up
from millrace.contracts.catalog import WIRE_TYPES

from setup.configuration import keys

ROOT = Path(__file__).resolve().parents[1]

#: Folders of Python sources by kind. ``models`` and ``examples`` are none of them.
KINDS = {
    "product": ("services", "libs", "simulator", "deployment"),
    "papers": ("papers",),
    "tests": ("tests",),
    "bench": ("bench",),
}


def census() -> dict[str, int]:
    """Every number by its name."""
    files = _tracked()
    python = [path for path in files if path.suffix == ".py"]
    counts = {f"{kind} lines": _lines(path for path in python if path.parts[0] in KINDS[kind]) for kind in KINDS}
    words = {path: len((ROOT / path).read_text().split()) for path in files if path.suffix == ".md"}
    options = argparse.ArgumentParser(add_help=False)
    up.add_arguments(options)
    return counts | {
        "configuration keys": len(keys()),
        "wire types": len(WIRE_TYPES),
        "metrics": sum(line.startswith("| `millrace_") for line in (ROOT / "docs/METRICS.md").read_text().splitlines()),
        "decisions": sum(path.parent == Path("docs/decisions") and path.name[0].isdigit() for path in words),
        "words of Markdown": sum(words.values()),
        "options of up": sum(action.help != argparse.SUPPRESS for action in options._actions),
        "folders at the top": len({path.parts[0] for path in files if len(path.parts) > 1 and path.parts[0][0] != "."}),
    }


def _tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.split("\0") if name and (ROOT / (path := Path(name))).is_file()]


def _lines(paths: Iterable[Path]) -> int:
    return sum(len((ROOT / path).read_bytes().splitlines()) for path in paths)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    found = census()
    if parser.parse_args().json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{name:<20}{count:>9,}" for name, count in found.items()))
