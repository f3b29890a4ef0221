"""Cost of a status snapshot to a real vLLM engine per step, and to the worker that reads it, by batch size.

A real engine core runs in this process with the workers' scheduler class. Each batch size: decode a while, then time
the parts that the scheduler class adds (they are called as they are in a step), and what the worker does with them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.worker.vllm_engine import environment

REPEATS = 2_000
ROUNDS = 7
STEPS = 40


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="model folder; default: a 4-layer Llama with random weights")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 64])
    arguments = parser.parse_args()
    environment.prepare()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or _random_model(Path(folder))
        core, reader = _engine(model, max(arguments.batches))
        print(
            f"{'sequences':>9} {'step ms':>8} {'write us':>9} {'batch us':>9} {'read us':>8} {'bytes':>6} {'share':>6}"
        )
        for size in arguments.batches:
            print(_row(core, reader, size))
    return 0


def _random_model(folder: Path) -> str:
    from tests.testbed import tiny_llama

    return str(tiny_llama.build(folder / "llama"))


def _engine(model: str, max_num_seqs: int) -> tuple[Any, Any]:
    """An in-process engine core with the snapshot scheduler, and a reader of its buffer."""
    from vllm import LLM

    from services.worker.vllm_engine import snapshot_buffer
    from services.worker.vllm_engine.snapshot_scheduler import SNAPSHOT_PATH

    path = snapshot_buffer.create()
    llm = LLM(
        model=model,
        block_size=32,
        max_num_seqs=max_num_seqs,
        kv_cache_memory_bytes=256 << 20,
        enforce_eager=True,
        distributed_executor_backend="uni",
        scheduler_cls="services.worker.vllm_engine.snapshot_scheduler.SnapshotScheduler",
        additional_config={SNAPSHOT_PATH: str(path)},
        disable_log_stats=True,
    )
    reader = snapshot_buffer.SnapshotReader(path)
    path.unlink()
    return llm, reader


def _row(llm: Any, reader: Any, size: int) -> str:
    from vllm import SamplingParams

    from services.worker.vllm_engine.snapshot_scheduler import composition, decode_snapshot

    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    outputs: list[Any] = []
    schedule = scheduler.schedule

    def keeping(*words: Any, **named: Any) -> Any:
        outputs.append(schedule(*words, **named))
        return outputs[-1]

    scheduler.schedule = keeping
    for index in range(size):
        sampling = SamplingParams(max_tokens=900, ignore_eos=True, detokenize=False)
        engine.add_request(f"bench-request-{index:04d}.0~{index}", {"prompt_token_ids": [1 + index] * 40}, sampling)
    durations = [_timed(engine.step) for _ in range(STEPS)][10:]
    scheduler.schedule = schedule
    write_us = _best(scheduler.write_snapshot)
    batch_us = _best(lambda: composition(outputs[-1], scheduler.requests))
    scheduler.write_snapshot()
    payload = reader.read_new()
    read_us = _best(lambda: decode_snapshot(payload))
    engine.abort_request([request.split("~")[0] for request in list(scheduler.requests)])
    scheduler.finish_requests(None, _aborted())
    engine.step()
    step_ms = statistics.median(durations) * 1e3
    share = (write_us + batch_us) / (step_ms * 1e3)
    return (
        f"{size:>9} {step_ms:>8.2f} {write_us:>9.1f} {batch_us:>9.1f} {read_us:>8.1f} {len(payload):>6} {share:>6.1%}"
    )


def _aborted() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED


def _timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _best(work: Callable[[], Any]) -> float:
    """Microseconds of one call: the best round of several, so that a busy machine adds little."""
    rounds = []
    for _ in range(ROUNDS):
        started = time.process_time()
        for _ in range(REPEATS // ROUNDS):
            work()
        rounds.append((time.process_time() - started) / (REPEATS // ROUNDS) * 1e6)
    return min(rounds)


if __name__ == "__main__":
    raise SystemExit(main())
