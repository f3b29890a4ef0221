"""A sequence of each family of models says what plain vLLM says, moves there and back with its KV, and goes on from
its tokens alone elsewhere.

`./task test` does so with one, `./task test:families` with all; with ``MILLRACE_FAMILIES=N`` each moves N times under
load besides. The table in docs/MIGRATION.md has a row for each.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from millrace.actor.engine import EngineStepped
from millrace.contracts.worker import Sampling

from services.worker.config import MigrationConfig
from tests.engine.bench_engine import BenchEngine, config, reference
from tests.engine.conftest import MOVES, Note
from tests.engine.moving import Pair, prompt_of, recomputed, settled, there_and_back
from tests.engine.travelling import COMPUTED_AGAIN, FAULTS, KINDS, travel
from tests.testbed import moving_families
from tests.testbed.moving_families import Family

pytestmark = pytest.mark.timeout(900)

#: Output tokens at which a sequence moves: before its window of 64 is full, across its end, long after it.
POINTS = (20, 60, 260)
#: Lengths of prompts whose answers are compared.
TEXTS = (9, 40, 100, 170)
TEXT = Sampling(max_tokens=300 if MOVES else 100, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def engines(family: Family, folder: Path) -> Iterator[Pair]:
    fields: dict[str, Any] = {
        "kv_bytes": 16 << 20,
        "migration": MigrationConfig(copy_bytes_per_step=64 << 10),
        "engine_args": moving_families.engine_args(family, folder),
    }
    with BenchEngine(config(folder, **fields)) as source, BenchEngine(config(folder, **fields, seed=99), "t") as target:
        yield Pair(source, target)


@pytest.fixture(scope="module")
def stayed(engines: Pair, family: Family) -> dict[int, list[int]]:
    """Tokens of a sequence that stays, by the point at which another one moves."""
    names = {at: engines.source.add(_prompt(at), _sampling(family, at)) for at in POINTS}
    return {at: engines.source.finish(name)[0].tokens for at, name in names.items()}


@pytest.fixture(scope="module")
def plain(engines: Pair, family: Family, folder: Path) -> list[list[int]]:
    """Tokens that plain vLLM says to ``TEXTS``."""
    prompts = [prompt_of(length, salt=length) for length in TEXTS]
    fields = {"max_tokens": TEXT.max_tokens, "temperature": TEXT.temperature, "ignore_eos": True}
    # With its prefix cache plain vLLM's engine dies on a CPU of the hybrid family's second prompt.
    engine = moving_families.engine_args(family, folder)
    answers = reference(folder, [(prompt, fields) for prompt in prompts], enable_prefix_caching=False, **engine)
    return [tokens for tokens, _, _ in answers]


def _prompt(at: int) -> list[int]:
    return prompt_of(20, salt=at)


def _sampling(family: Family, at: int) -> Sampling:
    """Of 100 tokens more than ``at``. Families that draft have 300, which they take few steps for: with 100 one could
    end before it was frozen. They are not random either: how many numbers they have drawn depends on what was drafted.
    """
    drafts = "speculative_config" in family.engine
    more, temperature = (300, 0.0) if drafts else (100, 1.0)
    return Sampling(max_tokens=at + more, temperature=temperature, seed=at, ignore_eos=True)


@pytest.mark.parametrize("at", POINTS)
def test_a_sequence_goes_there_and_back_as_if_it_had_stayed(
    engines: Pair, family: Family, stayed: dict[int, list[int]], at: int
) -> None:
    assert engines.source.info.kv_refusal == ""
    since = len(engines.target.events)
    moved = there_and_back(engines, _prompt(at), _sampling(family, at), at)
    assert moved.tokens == stayed[at]
    if "speculative_config" not in family.engine:  # steps that verify drafts count as computing
        assert not recomputed(engines.target, since), "nothing was computed again"
    if moving_families.drafts_by_model(family):
        assert _tokens_per_step(engines.target, since) > 2.5, "drafts hit as before: their KV moved with the rest"
    settled(engines)


def _tokens_per_step(engine: BenchEngine, since: int) -> float:
    """Of the one sequence that decodes since so many events."""
    steps = [event for event in engine.events[since:] if isinstance(event, EngineStepped)]
    counts = [len(output.token_ids) for step in steps for output in step.outputs if output.token_ids]
    return sum(counts) / len(counts)


def test_a_sequence_goes_on_elsewhere_from_its_tokens(
    engines: Pair, family: Family, stayed: dict[int, list[int]]
) -> None:
    """As after a kill."""
    names = {at: engines.target.add(_prompt(at), _sampling(family, at), stayed[at][:at]) for at in POINTS}
    for at, name in names.items():
        assert engines.target.finish(name)[0].tokens == stayed[at][at:], at


def test_text_is_what_plain_vllm_says(engines: Pair, plain: list[list[int]], note: Note) -> None:
    names = [engines.source.add(prompt_of(length, salt=length), TEXT) for length in TEXTS]
    assert [each.tokens for each in engines.source.finish(*names)] == plain
    note("text", sum(map(len, plain)))


@pytest.mark.skipif(MOVES < 2, reason="MILLRACE_FAMILIES=N, N > 1, has each family move N times")
def test_many_moves_change_no_token(engines: Pair, family: Family, note: Note) -> None:
    kinds = KINDS
    if "speculative_config" in family.engine:
        kinds = tuple((length, msgspec.structs.replace(how, temperature=0.0)) for length, how in KINDS)
    travel(engines, MOVES, kinds=kinds, faults=[fault for fault in FAULTS if fault not in COMPUTED_AGAIN])
    note("moves", MOVES)
