"""Import directions that concern single files; those between packages are contracts in pyproject.toml."""

import ast
from pathlib import Path

from tests.tidy.tree import imported_modules, is_within, parsed, python_files

#: The pure core: time, randomness and answers from outside come in as arguments and messages.
PURE_FOLDERS = tuple(f"libs/millrace/{name}/" for name in ("contracts", "policies", "enginemodel", "kvcache"))
PURE_SERVICE_FILES = ("actor.py", "state.py")

IMPURE = frozenset(
    "asyncio concurrent datetime http httpx logging multiprocessing nats opentelemetry os prometheus_client requests "
    "secrets select socket ssl structlog subprocess threading time uuid uvicorn uvloop".split()
)

#: `random.Random` is the type of the generator that is passed in; the module's own functions share one hidden state.
ALLOWED_OF_RANDOM = {"Random"}

#: Everything that knows vLLM's inside lies in services/worker.
ENGINE_PACKAGES = frozenset({"vllm"})
ENGINE_HOMES = (
    "services/worker/",
    "tests/engine/",
    "tests/contract/",
    "tests/gpu/",
    "bench/",
    "examples/vllm_bench.py",
)


def _pure_files() -> list[Path]:
    return [
        path
        for path in python_files("libs", "services")
        if str(path).startswith(PURE_FOLDERS) or (path.parts[0] == "services" and path.name in PURE_SERVICE_FILES)
    ]


def test_there_is_a_pure_core_to_look_at():
    files = [str(path) for path in _pure_files()]
    assert any(path.startswith(PURE_FOLDERS) for path in files)
    assert any(path.startswith("services/") for path in files)


def test_the_pure_core_imports_no_clock_socket_or_environment():
    wrong = [
        f"{path}:{line}: {module}"
        for path in _pure_files()
        for module, line in imported_modules(path)
        if is_within(module, IMPURE)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_pure_core_draws_no_hidden_random_numbers():
    wrong = []
    for path in _pure_files():
        has_module = "random" in _plain_imports(path)  # else `random` may be a policy of that name
        for node in ast.walk(parsed(path)):
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
    return {alias.name for node in ast.walk(parsed(path)) if isinstance(node, ast.Import) for alias in node.names}


def test_only_the_worker_knows_vllm():
    wrong = [
        f"{path}:{line}: {module}"
        for path in python_files()
        if not str(path).startswith(ENGINE_HOMES)
        for module, line in imported_modules(path)
        if is_within(module, ENGINE_PACKAGES)
    ]
    assert not wrong, "\n".join(wrong)


def test_an_actor_imports_no_runtime():
    runtimes = frozenset({"millrace.actor.runtime_nats", "millrace.sim", "millrace.cli", "simulator"})
    wrong = [
        f"{path}:{line}: {module}"
        for path in _pure_files()
        for module, line in imported_modules(path)
        if is_within(module, runtimes)
    ]
    assert not wrong, "\n".join(wrong)
