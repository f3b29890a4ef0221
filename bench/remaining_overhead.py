"""Remaining lengths from hidden states: what reading them costs a step, and whether a token changes.

    python -m bench remaining_overhead --model millrace-mini

One real vLLM engine in this process with a worker's scheduler and runner; the shipped head, or a random one where none
ships. Batches of 8 and 64 requests decode in blocks of steps with the head and without, in turn; the figure is the
difference of the medians over all steps, in processor time, relative to a step without. Two aims: at most 0.5 %, and
the same tokens. Steps of both kinds alternate in blocks of ``every``, so that each block has one whole round of rows.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from millrace.lengths.head import FEATURES, HEAD_FILE, HeadInfo, RemainingHead, survival_table, write_head
from millrace.lengths.scoring import interval
from millrace.lengths.survival import Survival

from bench.lengths.record_states import engine_of
from services.worker.config import MigrationConfig, RemainingConfig, WorkerConfig

ROOT = Path(__file__).resolve().parents[1]
AIM = 0.005
SEED = 7


def head_of(folder: Path, config: WorkerConfig) -> Path:
    """The shipped head, or one of random weights for this model."""
    if (folder / HEAD_FILE).exists():
        return folder / HEAD_FILE
    import json

    from services.worker.vllm_engine.kv_endpoint import weights

    width = int(json.loads((folder / "config.json").read_text())["hidden_size"])
    rng = np.random.default_rng(SEED)
    sizes = ((width + len(FEATURES), 64), (64, 2))
    layers = [(rng.normal(0, 0.02, size).astype(np.float32), np.zeros(size[1], np.float32)) for size in sizes]
    survival = Survival()
    for length in rng.lognormal(4, 1, 500).astype(int).tolist():
        survival.learn(length + 1)
    info = HeadInfo(model=config.model, fingerprint=weights(str(folder), config), hidden_size=width)
    path = Path(tempfile.mkdtemp()) / "head.safetensors"
    write_head(path, RemainingHead(info, layers, survival_table(survival)))
    return path


class Alternation:
    """Switches the reader of an engine's runner on and off."""

    def __init__(self, engine: Any) -> None:
        self._runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self._reader = self._runner.millrace_reader

    def set(self, *, on: bool) -> None:
        """From the next step on."""
        self._runner.millrace_reader = self._reader if on else None


def decode(engine: Any, running: int, steps: int, *, every: int) -> tuple[dict[bool, list[float]], list[list[int]]]:
    """Step times in ms, mean of each block of ``every``, by whether states were read; and every request's tokens."""
    from vllm import SamplingParams

    for index in range(running):
        sampling = SamplingParams(temperature=0.0, max_tokens=steps + 20, ignore_eos=True, detokenize=False)
        prompt = [6 + (index * 31 + at * 7) % 600 for at in range(20)]
        engine.add_request(f"{running}-{index}~{time.monotonic_ns()}", {"prompt_token_ids": prompt}, sampling)
    switch, tokens = Alternation(engine), dict[str, list[int]]()
    blocks: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(10):
        _step(engine, tokens)
    for block in range(steps // every):
        on = block % 2 == 0
        switch.set(on=on)
        began = time.process_time_ns()
        for _ in range(every):
            _step(engine, tokens)
        blocks[on].append((time.process_time_ns() - began) / 1e6 / every)
    switch.set(on=True)
    while engine.has_unfinished_requests():
        _step(engine, tokens)
    return blocks, [tokens[name] for name in sorted(tokens)]


def _step(engine: Any, tokens: dict[str, list[int]]) -> None:
    for output in engine.step():
        tokens[output.request_id.partition("~")[0]] = list(output.outputs[0].token_ids)


def main() -> int:
    """Prints a table; returns 1 where a token differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="millrace-mini")
    parser.add_argument("--running", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--steps", type=int, default=800)
    arguments = parser.parse_args()
    folder = ROOT / "models" / arguments.model
    plain = WorkerConfig(
        name="bench",
        model=arguments.model,
        model_path=str(folder),
        max_num_seqs=64,
        max_model_len=1_024,
        migration=MigrationConfig(enabled=False),
    )
    remaining = RemainingConfig(head=str(head_of(folder, plain)))
    config = WorkerConfig(**{name: getattr(plain, name) for name in plain.__struct_fields__} | {"remaining": remaining})
    print(f"{arguments.model}: every {remaining.every} steps; aim {AIM:.1%} of a step, the same tokens")
    print(f"{'running':>8} {'step ms':>9} {'read µs':>9} {'share':>8} {'95 % interval':>18} {'tokens':>10}")
    same = True
    with engine_of(config) as (engine, refusal):
        if refusal:
            raise SystemExit(f"no states: {refusal}")
        for running in arguments.running:
            same &= _row(engine, running, arguments.steps, remaining.every)
    return 0 if same else 1


def _row(engine: Any, running: int, steps: int, every: int) -> bool:
    blocks, tokens = decode(engine, running, steps, every=every)
    pairs = min(len(blocks[True]), len(blocks[False]))
    differences = np.array(blocks[True][:pairs]) - np.array(blocks[False][:pairs])
    step = float(np.median(blocks[False]))
    # Blocks that the machine disturbed lie far out on either side: the middle 80 % of the differences count.
    low, high = np.quantile(differences, (0.1, 0.9))
    kept = differences[(differences >= low) & (differences <= high)]
    mean, (least, most) = float(kept.mean()), interval(kept, seed=SEED)
    again = _plain(engine, running, steps)
    equal = again == tokens
    share, bounds = mean / step, f"[{least / step:+.2%}, {most / step:+.2%}]"
    verdict = "same" if equal else "DIFFER"
    print(f"{running:>8} {step:>9.3f} {mean * 1e3:>9.1f} {share:>8.2%} {bounds:>18} {verdict:>10}")
    return equal


def _plain(engine: Any, running: int, steps: int) -> list[list[int]]:
    """Tokens of the same requests with no state read at all."""
    from vllm import SamplingParams

    switch, tokens = Alternation(engine), dict[str, list[int]]()
    switch.set(on=False)
    for index in range(running):
        sampling = SamplingParams(temperature=0.0, max_tokens=steps + 20, ignore_eos=True, detokenize=False)
        prompt = [6 + (index * 31 + at * 7) % 600 for at in range(20)]
        engine.add_request(f"{running}-{index}~{time.monotonic_ns()}", {"prompt_token_ids": prompt}, sampling)
    while engine.has_unfinished_requests():
        _step(engine, tokens)
    switch.set(on=True)
    return [tokens[name] for name in sorted(tokens)]
