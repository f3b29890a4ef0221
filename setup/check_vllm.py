"""Compares a vLLM with a list of every symbol of vLLM that Millrace uses.

    ./task check:vllm            the vLLM of this installation
    ./task check:vllm 0.33.0     that release, from the package index, whose source is read and never imported

Prints what is missing, and for a release also which of those symbols are written otherwise than in this installation.
The exit status is 1 where something is missing.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SYMBOLS = ROOT / "services" / "worker" / "vllm_engine" / "vllm_symbols.txt"
#: Whose imports the file must name.
USERS = ("services", "libs", "deployment", "papers/ares/hidden_states")


class VllmSource:
    """The source of one vLLM."""

    def __init__(self, read: Callable[[str], str | None]) -> None:
        """Args: read: text of a file by its path from the package on, such as ``/envs.py``; None: no such file."""
        self.read = read
        self._modules: dict[str, ast.Module | None] = {}

    def module(self, name: str) -> ast.Module | None:
        """Its tree; None where there is no such module."""
        if name not in self._modules:
            texts = (self.read(f"{_path(name)}{end}") for end in (".py", "/__init__.py"))
            text = next((text for text in texts if text is not None), None)
            self._modules[name] = ast.parse(text) if text is not None else None
        return self._modules[name]

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """(module, definition) of a name of a module, wherever it was imported from."""
        tree = self.module(module)
        for node in _statements(tree.body if tree else []):
            if name in _names(node):
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if name == (alias.asname or alias.name):
                        return self._imported(module, node, alias.name)
        submodule = self.module(f"{module}.{name}")
        return (f"{module}.{name}", submodule) if submodule is not None else None

    def _imported(self, module: str, node: ast.ImportFrom, name: str) -> tuple[str, ast.AST] | None:
        source = node.module or ""
        if node.level:
            up = node.level - (self.read(f"{_path(module)}/__init__.py") is not None)
            source = ".".join([*module.split(".")[: -up or None], source]).rstrip(".")
        return self.find(source, name) if source.split(".")[0] == "vllm" else (source, node)

    def member(self, module: str, node: ast.AST, name: str) -> ast.AST | None:
        """A method, a field, or an attribute that some method sets, of a class or one of its bases."""
        if not isinstance(node, ast.ClassDef):
            return None
        for each in _statements(node.body):
            if name in _names(each):
                return each
        for inner in ast.walk(node):
            if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and inner.attr == name:
                return inner
        for base in node.bases:
            found = self.find(module, base.id) if isinstance(base, ast.Name) else None
            inherited = self.member(*found, name) if found else None
            if inherited is not None:
                return inherited
        return None

    def resolve(self, module: str, symbol: str) -> ast.AST | str:
        """The definition of a word of the file; or, as text, what of it is missing."""
        path, _, parameters = symbol.partition("(")
        name, _, member = path.partition(".")
        found = self.find(module, name)
        if found is None:
            return f"{module} has no {name}"
        node = self.member(*found, member) if member else found[1]
        if node is None:
            return f"{module}.{name} has no {member}"
        for parameter in filter(None, parameters.rstrip(")").split(",")):
            if not self._takes(found[0], node, parameter):
                return f"{module}.{path} takes no {parameter}"
        return node

    def _takes(self, module: str, node: ast.AST | None, parameter: str) -> bool:
        if isinstance(node, ast.ClassDef):
            made = self.member(module, node, "__init__")
            return self.member(module, node, parameter) is not None or self._takes(module, made, parameter)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return False
        named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        return node.args.kwarg is not None or parameter in [each.arg for each in named]


def _path(module: str) -> str:
    return module.removeprefix("vllm").replace(".", "/")


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module or class, with what stands under a condition."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            handled = [each for handler in getattr(node, "handlers", []) for each in handler.body]
            yield from _statements([*node.body, *node.orelse, *handled])


def _names(node: ast.AST) -> list[str]:
    match node:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            return [node.name]
        case ast.Assign():
            return [target.id for target in node.targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def symbols() -> list[tuple[str, str]]:
    """(module, symbol with a member and parameters) of all words of the file."""
    found, module, name = [], "", ""
    for line in SYMBOLS.read_text().splitlines():
        words = line.partition("#")[0].split()
        if words and not line.startswith(" "):
            module, _, name = words.pop(0).rpartition(".")
            found.append((module, name))
        found += [(module, f"{name}{word}" if word.startswith("(") else f"{name}.{word}") for word in words]
    return found


def unlisted() -> list[str]:
    """Imports of vLLM in Millrace that the file does not name."""
    imported: set[tuple[str, str]] = set()
    for path in (path for user in USERS for path in (ROOT / user).rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "from vllm" in text else ():
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm":
                imported |= {(node.module, alias.name) for alias in node.names}
    return [f"{SYMBOLS.name} does not name {module}.{name}" for module, name in sorted(imported - set(symbols()))]


def compare(source: VllmSource, installed: VllmSource) -> tuple[list[str], list[str]]:
    """Symbols that are missing, and those that are written otherwise than in the installed one."""
    missing, changed = [], []
    followed = {symbol.partition(".")[0] for _, symbol in symbols() if "." in symbol}
    for module, symbol in symbols():
        node, here = source.resolve(module, symbol), installed.resolve(module, symbol)
        if isinstance(node, str):
            missing.append(node)
        elif isinstance(here, ast.Module) or symbol.partition("(")[0] in followed:
            continue  # its members say more
        elif not isinstance(here, str) and ast.dump(node) != ast.dump(here):
            changed.append(f"{module}.{symbol}")
    return missing, changed


def installed_source() -> VllmSource:
    """That of this installation. Raises StopIteration: there is none."""
    base = next(folder for each in sys.path if (folder := Path(each, "vllm")).joinpath("__init__.py").is_file())
    return VllmSource(lambda path: file.read_text() if (file := Path(f"{base}{path}")).is_file() else None)


def released_source(version: str, folder: Path) -> VllmSource:
    """That of a release, downloaded to a folder."""
    words = ["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    subprocess.run([sys.executable, *words, f"vllm=={version}"], check=True)
    archive = zipfile.ZipFile(next(folder.glob("vllm-*.whl")))
    names = set(archive.namelist())
    return VllmSource(lambda path: archive.read(f"vllm{path}").decode() if f"vllm{path}" in names else None)


def main(version: str = "") -> int:
    """Prints what is missing and what changed; returns the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        installed = installed_source()
        missing, changed = compare(released_source(version, Path(folder)) if version else installed, installed)
    missing += unlisted()
    print(f"vLLM {version or 'as installed'}: {len(symbols())} symbols, {len(missing)} missing, {len(changed)} changed")
    print(*(f"  missing: {each}" for each in missing), *(f"  changed: {each}" for each in changed), sep="\n")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
