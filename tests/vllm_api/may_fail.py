"""Plugin: the tests of vLLM's that may fail here, by ``may_fail.toml``."""

import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace

import pytest

REASONS: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("may_fail.toml").read_text())
LEFT_OUT = tuple(pattern for patterns in REASONS.values() for pattern in patterns if pattern.endswith(".py"))


def pytest_configure() -> None:
    """Adapters that a fixture would download are asked of no server here."""
    from vllm.transformers_utils import repo_utils

    repo_utils.hf_api = lambda: SimpleNamespace(snapshot_download=lambda *_, **__: "")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out files that ask no server, and those that may fail as a whole."""
    if not collection_path.name.startswith("test_") or collection_path.is_dir():
        return None
    text = collection_path.read_text()
    asks = "RemoteOpenAIServer" in text or "client: openai.AsyncOpenAI" in text
    return None if asks and not str(collection_path).endswith(LEFT_OUT) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that ask no server, and expect failures of what a pattern names."""
    asking = [item for item in items if any("server" in name for name in getattr(item, "fixturenames", ()))]
    config.hook.pytest_deselected(items=[item for item in items if item not in asking])
    items[:] = asking
    for item in items:
        item._nodeid = item.nodeid  # type: ignore[attr-defined]  # schemathesis 4 changes what pytest 9.2 renamed
        for reason, patterns in REASONS.items():
            if any(fnmatchcase(item.nodeid, f"*{pattern}*") for pattern in patterns):
                item.add_marker(pytest.mark.xfail(reason=reason))
