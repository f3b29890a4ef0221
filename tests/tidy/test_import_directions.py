"""Import directions that concern single files; those between packages are contracts in pyproject.toml."""

import ast
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.tidy.tree import imported_modules, is_within, nodes, python_files

#: The pure core: time, randomness and answers from outside come in as arguments and messages.
PURE_FOLDERS = tuple(f"libs/millrace/{name}/" for name in ("contracts", "policies", "enginemodel", "kvcache"))

#: Modules of services that do I/O, read clocks or compose a process; every other module of a service is pure core.
#: ``metrics`` modules hold counters as prometheus_client's collectors, which touch nothing outside.
SHELLS = (
    "*/__main__.py",
    "*/metrics.py",
    "ingress/vllm_metrics.py",
    "coordinator/shell.py",
    "ingress/api/tokenizer.py",
    "ingress/http/*",
    "judge/shell.py",
    "page/server.py",
    "worker/canary.py",
    "supervisor/buckets.py",
    "supervisor/compose_host.py",
    "supervisor/display.py",
    "supervisor/launcher.py",
    "supervisor/layout.py",
    "supervisor/preflight.py",
    "supervisor/rereading.py",
    "supervisor/store_guard.py",
    "supervisor/probes.py",
    "ingress/parsing/host.py",
    "ingress/parsing/images.py",
    "ingress/parsing/light_vllm.py",
    "ingress/parsing/process.py",
    "tagger/shell.py",
    "worker/modelled.py",
    "worker/profile.py",
    "worker/vllm_engine/*",
)
#: Pure modules that may import shells: they compose an actor from its files, or parse HTTP bodies with the tokenizer.
ABOVE_SHELLS = ("*/build.py", "*/replay.py", "ingress/api/*")

IMPURE = frozenset(
    "asyncio concurrent datetime http httpx logging multiprocessing nats opentelemetry os prometheus_client requests "
    "secrets select socket ssl structlog subprocess threading time uuid uvicorn uvloop".split()
)

#: `random.Random` is the type of the generator that is passed in; the module's own functions share one hidden state.
ALLOWED_OF_RANDOM = {"Random"}

#: Everything that knows vLLM's inside lies in services/worker, and in a plugin of papers/; its parsers run in a process
#: of ingress's, and the table of its routes in docs/API.md is made from its document.
ENGINE_HOMES = (
    "services/ingress/parsing/",
    "services/worker/",
    "tests/engine/",
    "tests/contract/",
    "tests/gpu/",
    "tests/testbed/",
    "bench/",
    "papers/ares/bench/",
    "papers/ares/hidden_states/",
    "papers/cascadeinfer/bench/",
    "examples/vllm_bench.py",
    "setup/api_table.py",
    "tests/vllm_api/",
)

#: Tests of a bench's own functions; all others share rigs with benches by way of tests/testbed/.
BENCH_TESTS = ("tests/*/test_bench_*.py", "tests/tidy/test_results.py")


def _is_one_of(path: Path, patterns: tuple[str, ...]) -> bool:
    inside = str(path).removeprefix("services/")
    return any(fnmatch(inside, pattern) for pattern in patterns)


def _pure_files() -> list[Path]:
    library = [path for path in python_files("libs") if str(path).startswith(PURE_FOLDERS)]
    return library + [path for path in python_files("services") if not _is_one_of(path, SHELLS)]


def test_there_is_a_pure_core_to_look_at_and_every_shell_exists():
    files = [str(path) for path in _pure_files()]
    assert any(path.startswith(PURE_FOLDERS) for path in files)
    assert {Path(name).parts[1] for name in files if name.startswith("services/")} >= {"ingress", "worker"}
    services = python_files("services")
    unused = [pattern for pattern in SHELLS if not any(_is_one_of(path, (pattern,)) for path in services)]
    assert not unused, "no such module: " + ", ".join(unused)


SHELL_MODULES = frozenset(
    ".".join(path.with_suffix("").parts)
    for path in python_files("services")
    if _is_one_of(path, SHELLS) and path.name not in ("metrics.py", "vllm_metrics.py", "__init__.py")
)
CORES = [path for path in _pure_files() if path.parts[0] == "services" and not _is_one_of(path, ABOVE_SHELLS)]
RUNTIMES = frozenset({"millrace.actor.runtime_nats", "millrace.sim", "millrace.cli", "simulator"})
RIGS = [path for path in python_files("tests") if path.parts[1] == "testbed"]
TESTS = [path for path in python_files("tests") if not any(path.match(pattern) for pattern in BENCH_TESTS)]


@pytest.mark.parametrize(
    ("files", "modules"),
    [
        pytest.param(CORES, SHELL_MODULES, id="the core of a service imports no shell"),
        pytest.param(_pure_files(), IMPURE, id="the pure core imports no clock, socket or environment"),
        pytest.param(_pure_files(), RUNTIMES, id="an actor imports no runtime"),
        pytest.param(
            [path for path in python_files() if not str(path).startswith(ENGINE_HOMES)],
            frozenset({"vllm"}),
            id="only the worker knows vLLM",
        ),
        pytest.param(TESTS, frozenset({"bench"}), id="tests import no bench but the one that they test"),
        pytest.param([*RIGS, *python_files("bench")], frozenset({"tests"}), id="rigs and benches import no test"),
    ],
)
def test_nothing_imports_what_it_must_not_know(files: list[Path], modules: frozenset[str]):
    wrong = [
        f"{path}:{line}: {module}"
        for path in files
        for module, line in imported_modules(path)
        if is_within(module, modules) and not is_within(module, frozenset({"tests.testbed"}))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_pure_core_draws_no_hidden_random_numbers():
    wrong = []
    for path in _pure_files():
        has_module = "random" in _plain_imports(path)  # else `random` may be a policy of that name
        for node in nodes(path):
            match node:
                case ast.Attribute(value=ast.Name(id="random"), attr=name) if (
                    has_module and name not in ALLOWED_OF_RANDOM
                ):
                    wrong.append(f"{path}:{node.lineno}: random.{name}")
                case ast.ImportFrom(module="random", names=names):
                    taken = {alias.name for alias in names} - ALLOWED_OF_RANDOM
                    wrong.extend(f"{path}:{node.lineno}: random.{name}" for name in sorted(taken))
    assert not wrong, "\n".join(wrong)


def _plain_imports(path: Path) -> set[str]:
    """Modules that the file binds by `import name`."""
    return {alias.name for node in nodes(path) if isinstance(node, ast.Import) for alias in node.names}
