"""The segment allocator against vLLM's own queue, in real vLLM: outputs, prefix hits, runs per request, cost.

One engine in this process, one run with each free-block queue. Requests come in a closed loop counted in steps, so
that both runs see the same load; every now and then a burst of long answers fills the cache and makes the engine
preempt. Most prompts begin with one of a few prefixes. With ``--prefixes 400`` many of these are about to be given
up when they are wanted again, where one queue keeps what the other has just reused. Microseconds are processor time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from millrace.enginemodel.parameters import EngineParameters
from millrace.kvcache.segments import HIT_WINDOW, WINDOW, runs

from bench.engine.in_process import open_engine, prepare
from bench.engine.segments_model import ModelledRun

MODELS = Path(__file__).resolve().parent.parent / "models"
BLOCK = 32
CLIENTS, RUNNING = 56, 48
BURST_EVERY, BURST = 2500, 48
VOCABULARY = (300, 600)  # ids of prompts


class Load(NamedTuple):
    """Load to play: number of requests and shared prefixes, blocks of cache, seed; how far the queue looks."""

    requests: int
    prefixes: int
    blocks: int
    seed: int
    window: int
    hit_window: int


class Outcome(NamedTuple):
    """Outcome of one request."""

    tokens: tuple[int, ...]
    hit_tokens: int
    blocks: int
    runs: int
    preemptions: int


class Figures(NamedTuple):
    """A run with one queue."""

    outcomes: dict[int, Outcome]
    allocations_us: list[float]
    steps: int
    seconds: float


def requests(load: Load) -> Iterator[tuple[list[int], int]]:
    """Prompts and output lengths."""
    rng = random.Random(load.seed)
    prefixes = [_tokens(rng, rng.choice((4, 8, 12)) * BLOCK) for _ in range(load.prefixes)]
    weights = [1 / (1 + rank) ** 0.5 for rank in range(load.prefixes)]
    for number in range(load.requests):
        if number % BURST_EVERY >= BURST_EVERY - BURST:
            yield _tokens(rng, rng.randint(600, 800)), rng.randint(400, 600)
            continue
        prefix = rng.choices(prefixes, weights)[0] if rng.random() < 0.8 else []
        yield prefix + _tokens(rng, rng.randint(2 * BLOCK, 8 * BLOCK)), rng.randint(16, 64)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(*VOCABULARY) for _ in range(count)]


def measure(load: Load, *, segments: bool) -> Figures:
    """Runs all requests on a new engine."""
    with open_engine(
        "nano",
        **_model(),
        block_size=BLOCK,
        max_model_len=2048,
        max_num_seqs=RUNNING,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=256 << 20,
        num_gpu_blocks_override=load.blocks,
        enable_prefix_caching=True,
    ) as engine:
        scheduler = engine.engine_core.engine_core.scheduler
        if segments:
            from services.worker.vllm_engine.segment_queue import install

            install(scheduler.kv_cache_manager, window=load.window, hit_window=load.hit_window)
        return _Run(engine, scheduler).all(load)


def modelled(load: Load, *, segments: bool) -> Figures:
    """The same with the modelled engine: no outputs and no cost, all else equal."""
    parameters = EngineParameters(
        max_model_len=2048,
        block_size=BLOCK,
        blocks_total=load.blocks - 1,  # vLLM counts its null block
        max_sequences=RUNNING,
        token_budget=2048,
        segments=segments,
    )
    run = ModelledRun(parameters, window=load.window, hit_window=load.hit_window)
    ended = run.all(requests(load), clients=CLIENTS)
    outcomes = {it.number: Outcome((), it.hit_tokens, it.blocks, it.runs, it.preemptions) for it in ended}
    return Figures(outcomes, [0.0], run.steps, run.seconds)


def _model() -> dict[str, Any]:
    return {"model": str(MODELS / "millrace-nano"), "load_format": "auto", "dtype": "float32"}


class _Run:
    """Watches the queue's allocations and each request's blocks just before they are freed."""

    def __init__(self, engine: Any, scheduler: Any) -> None:
        self._engine, self._scheduler = engine, scheduler
        self._tables: dict[str, tuple[int, int, int]] = {}
        self._allocations: list[float] = []
        queue = scheduler.kv_cache_manager.block_pool.free_block_queue
        self._popleft_n, queue.popleft_n = queue.popleft_n, self._timed
        self._free, scheduler.kv_cache_manager.free = scheduler.kv_cache_manager.free, self._noting

    def _timed(self, count: int) -> list[Any]:
        began = time.thread_time()
        blocks: list[Any] = self._popleft_n(count)
        self._allocations.append((time.thread_time() - began) * 1e6)
        return blocks

    def _noting(self, request: Any) -> None:
        if request.is_finished():
            (table,) = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)
            self._tables[request.request_id] = (len(table), runs(table), request.num_preemptions)
        self._free(request)

    def all(self, load: Load) -> Figures:
        """Keeps CLIENTS requests in the engine until all are done."""
        from vllm import SamplingParams

        began = time.perf_counter()
        waiting = enumerate(requests(load))
        under_way = steps = 0
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < load.requests:
            while under_way < CLIENTS and (following := next(waiting, None)):
                number, (prompt, tokens) = following
                parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
                self._engine.add_request(str(number), {"prompt_token_ids": prompt}, parameters)
                under_way += 1
            steps += 1
            for output in self._engine.step():
                if output.finished:
                    under_way -= 1
                    outcomes[int(output.request_id)] = self._outcome(output)
        seconds = time.perf_counter() - began
        return Figures(outcomes, self._allocations, steps, seconds)

    def _outcome(self, output: Any) -> Outcome:
        identity = next(name for name in self._tables if name.split("-")[0] == output.request_id)
        blocks, pieces, preemptions = self._tables.pop(identity)
        return Outcome(tuple(output.outputs[0].token_ids), output.num_cached_tokens, blocks, pieces, preemptions)


def report(name: str, figures: Figures) -> None:
    """One line of the table."""
    outcomes = figures.outcomes.values()
    count, costs = len(outcomes), figures.allocations_us
    print(
        f"{name:9} {sum(o.blocks for o in outcomes) / count:7.2f} {sum(o.runs for o in outcomes) / count:7.2f} "
        f"{max(o.runs for o in outcomes):5} {sum(o.hit_tokens for o in outcomes):11,} "
        f"{sum(o.preemptions for o in outcomes):12,} {len(costs):12,} {statistics.median(costs):6.1f} "
        f"{statistics.fmean(costs):6.1f} "
        f"{figures.steps:8,} {figures.seconds:7.0f}",
        flush=True,
    )


def compare(stock: Figures, segments: Figures) -> None:
    """Says of how many requests outputs and hits differ."""
    pairs = [(outcome, segments.outcomes[number]) for number, outcome in stock.outcomes.items()]
    tokens = sum(a.tokens != b.tokens for a, b in pairs)
    hits = [b.hit_tokens - a.hit_tokens for a, b in pairs if a.hit_tokens != b.hit_tokens]
    total = sum(a.hit_tokens for a, _ in pairs)
    print(
        f"of {len(pairs):,} requests: {tokens} with other outputs, {len(hits)} with other prefix hits "
        f"({sum(hits):+,} of {total:,} tokens, {sum(hits) / max(1, total):+.3%})"
    )


def main() -> int:
    """Runs both and compares; fails where an output differs."""
    parser = argparse.ArgumentParser(prog="python -m bench segments", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--prefixes", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=1600, help="of 32 tokens, in the cache")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--window", type=int, default=WINDOW)
    parser.add_argument("--hit-window", type=int, default=HIT_WINDOW)
    parser.add_argument("--modelled", action="store_true", help="on the modelled engine: seconds instead of minutes")
    options = vars(parser.parse_args())
    run = modelled if options.pop("modelled") else measure
    load = Load(**options)
    print(
        f"{load.requests:,} requests, {load.prefixes} prefixes, {load.blocks} blocks of {BLOCK} tokens, "
        f"seed {load.seed}, window {load.window}, {load.hit_window} for hit blocks"
    )
    print(
        f"{'queue':9} {'blocks':>7} {'runs':>7} {'max':>5} {'hit tokens':>11} {'preemptions':>12} {'allocations':>12} "
        f"{'us p50':>6} {'mean':>6} {'steps':>8} {'s':>7}"
    )
    prepare()
    stock = run(load, segments=False)
    report("stock", stock)
    segments = run(load, segments=True)
    report("segments", segments)
    compare(stock, segments)
    return int(any(o.tokens != segments.outcomes[number].tokens for number, o in stock.outcomes.items()))
