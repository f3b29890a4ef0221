"""The tracked files, and Python files parsed once: what every test of this folder looks at."""

import ast
import functools
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

GIT_SECONDS_MAX = 30


@functools.cache
def tracked_files() -> tuple[Path, ...]:
    """Paths relative to the root, in order; what git tracks and is still there."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True, timeout=GIT_SECONDS_MAX
    )
    paths = (Path(name) for name in sorted(filter(None, listing.stdout.split("\0"))))
    return tuple(path for path in paths if (ROOT / path).is_file())


def python_files(*folders: str) -> list[Path]:
    """Tracked Python files, below the folders given or everywhere."""
    return [path for path in tracked_files() if path.suffix == ".py" and (not folders or path.parts[0] in folders)]


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a tracked Python file."""
    return ast.parse((ROOT / path).read_text(), filename=str(path))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a tracked Python file as ``ast.walk`` gives them, but walked once, in a third of its time."""
    found: list[ast.AST] = [parsed(path)]
    for node in found:  # it grows meanwhile
        for value in vars(node).values():
            if isinstance(value, ast.AST):
                found.append(value)
            elif isinstance(value, list):
                found += [each for each in value if isinstance(each, ast.AST)]
    return found


def imported_modules(path: Path) -> list[tuple[str, int]]:
    """Every absolute import of the file at any depth, as (dotted module, line)."""
    found: list[tuple[str, int]] = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found.extend((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, node.lineno))
    return found


def is_within(module: str, packages: frozenset[str]) -> bool:
    """Whether the dotted module is one of the packages or lies in one."""
    parts = module.split(".")
    return any(".".join(parts[:length]) in packages for length in range(1, len(parts) + 1))
