"""The token budget of real vLLM's steps, changed while streams run."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from millrace.actor.engine import EngineStepped
from millrace.contracts.worker import Sampling

from tests.engine.bench_engine import BenchEngine, config
from tests.testbed import tiny_llama

#: Four streams, two of them drawn with a seed, and prompts of several full steps.
STREAMS = [Sampling(max_tokens=60, temperature=0.0 if index % 2 else 0.9, seed=index) for index in range(4)]
PROMPTS = [[(7 * index + place) % 250 + 1 for place in range(300 + 50 * index)] for index in range(4)]
BOUNDS = (17, 64, 0, 30, 128, 20)


def test_a_budget_that_changes_under_four_streams_changes_no_token(tmp_path: Path) -> None:
    engine = BenchEngine(config(tiny_llama.build(tmp_path / "model"), enable_prefix_caching=False))
    try:
        plain = [each.tokens for each in engine.finish(*_added(engine))]
        assert not _told(engine)
        names = _added(engine)
        for index, tokens in enumerate(BOUNDS):
            _limit(engine, tokens)
            _await(engine, names, bound=tokens if tokens < 128 else 0, generated=1 + 8 * index)
        assert [each.tokens for each in engine.finish(*names)] == plain
        assert _told(engine) >= {17, 64, 30, 20}
        assert all(computed <= bound for bound, computed in _steps(engine)), _steps(engine)
    finally:
        engine.stop()


def _added(engine: BenchEngine) -> list[str]:
    return [engine.add(prompt, sampling) for prompt, sampling in zip(PROMPTS, STREAMS, strict=True)]


def _limit(engine: BenchEngine, tokens: int) -> None:
    async def limit() -> None:
        engine.engine.limit_step(tokens)

    engine.loop.run_until_complete(limit())


def _await(engine: BenchEngine, names: list[str], *, bound: int, generated: int) -> None:
    """Waits until the bound is told, and the first stream has so many tokens."""
    engine.until(lambda: _last_bound(engine) == bound)
    engine.until(lambda: any(len(engine.decoded[n].tokens) >= generated for n in names if n in engine.decoded))


def _snapshots(engine: BenchEngine) -> list[tuple[int, int]]:
    """Bound and tokens of the step, by snapshot."""
    told = [getattr(event, "snapshot", None) for event in engine.events]
    return [(each.token_budget, each.batch.decodes + each.batch.prefill_tokens) for each in told if each is not None]


def _last_bound(engine: BenchEngine) -> int:
    return _snapshots(engine)[-1][0]


def _told(engine: BenchEngine) -> set[int]:
    return {bound for bound, _ in _snapshots(engine)} - {0}


def _steps(engine: BenchEngine) -> list[tuple[int, int]]:
    """Bound and tokens of steps that were scheduled under it: those whose snapshot before told the same bound."""
    snapshots = [
        (event.snapshot.token_budget, event.snapshot.batch)
        for event in engine.events
        if isinstance(event, EngineStepped) and event.snapshot is not None
    ]
    return [
        (bound, batch.decodes + batch.prefill_tokens)
        for (before, _), (bound, batch) in pairwise(snapshots)
        if before == bound != 0
    ]
