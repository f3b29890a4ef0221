"""Two engines of one model that sequences move between, started once for all tests of it; and families of models.

vLLM is imported once for all tests here and all clusters that they start: the fork server has it from this process.
"""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.testbed import moving_families, tiny_llama
from tests.testbed.moving_families import Family
from tests.testbed.programs import open_fork_server

if importlib.util.find_spec("vllm") is not None:
    from services.worker.vllm_engine import environment

    environment.prepare()
    from services.worker.vllm_engine import preload

    gc.disable()
    preload.preload()
    gc.enable()
    # Forked engines collect garbage three times while they start: half a second each over all that vLLM has imported.
    gc.collect()
    gc.freeze()
    open_fork_server()

if TYPE_CHECKING:
    from tests.engine.bench_engine import BenchEngine
    from tests.engine.moving import Pair

#: Moves of each family under load. Where it is not given only one family is tested, and not that.
MOVES = int(os.environ.get("MILLRACE_FAMILIES") or 0)
#: Notes what a family has passed, and how much of it.
Note = Callable[[str, int], None]


@pytest.fixture(scope="module", params=list(moving_families.FAMILIES) if MOVES else ["gemma3"])
def family_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def family(family_name: str) -> Family:
    return moving_families.FAMILIES[family_name]


@pytest.fixture(scope="module")
def folder(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return moving_families.build(tmp_path_factory.mktemp("family"), family)


@pytest.fixture
def note(family_name: str, request: pytest.FixtureRequest) -> Note:
    """For the table in docs/MIGRATION.md; nothing once a test has failed."""

    def noted(what: str, count: int) -> None:
        if MOVES and not request.session.testsfailed:
            moving_families.note(family_name, what, count)

    return noted


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights."""
    return tiny_llama.build(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="package")
def pair(model: Path) -> Iterator[Pair]:
    """The target has another seed, another token budget and no prefix cache; both have few blocks, and copy one of them
    between two steps.
    """
    from services.worker.config import MigrationConfig
    from tests.engine.bench_engine import BenchEngine, config
    from tests.engine.moving import Pair

    fields = {"kv_blocks": 65, "kv_bytes": 0, "migration": MigrationConfig(copy_bytes_per_step=64 << 10)}
    source = config(model, **fields, engine_cores=[min(os.sched_getaffinity(0))])
    target = config(model, **fields, seed=99, max_num_batched_tokens=64, enable_prefix_caching=False)
    with BenchEngine(source) as here, BenchEngine(target, "t") as there:
        yield Pair(here, there)


@pytest.fixture(scope="package")
def engine(pair: Pair) -> BenchEngine:
    """The one with a prefix cache."""
    return pair.source
