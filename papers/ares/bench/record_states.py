"""Records hidden states of a shipped model's answers, on real vLLM at temperature 1, with what became of them.

``python -m papers.ares.bench.record_states --model millrace-mini --output FILE`` writes what
``python -m papers.ares.hidden_states`` reads. Prompts are drawn as for the lengths (``bench.lengths.record``); each
brings the length that the shipped tagger predicts for it. The file is not committed: some 60 MB.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from millrace.contracts.tagger import TagRequest
from millrace.lengths.features import extract
from millrace.lengths.files import read_models
from millrace.lengths.history import LengthHistory
from millrace.lengths.prompttext import read_prompt
from millrace.lengths.quantile import QuantileModel, decode_model
from tokenizers import Tokenizer

from bench.lengths.record import EOS, Asked, draw
from services.worker.config import MigrationConfig, WorkerConfig
from services.worker.vllm_engine import environment

ROOT = Path(__file__).resolve().parents[3]
#: Requests that the engine knows of at a time.
WINDOW = 128


@contextmanager
def engine_of(config: WorkerConfig) -> Iterator[Any]:
    """A worker's engine in this process; shut down at the end."""
    environment.prepare()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    from vllm.v1.engine.llm_engine import LLMEngine

    from services.worker.vllm_engine import snapshot_buffer, startup

    torch.set_num_threads(1)
    path = snapshot_buffer.create()
    try:
        arguments = startup.engine_args(config)
        arguments.additional_config |= startup.engine_settings(config, path)
        engine = LLMEngine.from_engine_args(arguments)
    finally:
        path.unlink()
    try:
        yield engine
    finally:
        engine.engine_core.shutdown()


def tags(model: str, asked: list[Asked]) -> list[int]:
    """Mean length that the shipped tagger predicts for each prompt, tokens; 0 where it says nothing."""
    payload = read_models(None, shipped=True)[0].get(model)
    tagger: QuantileModel | None = decode_model(payload) if payload else None
    history = LengthHistory()
    said = []
    for index, one in enumerate(asked):
        question = TagRequest(
            request=str(index),
            model=model,
            prompt=one.prompt,
            prompt_tokens=len(one.token_ids),
            max_tokens=one.max_tokens,
        )
        row = np.array(extract(question, read_prompt(one.prompt), history))
        estimate = tagger.estimate(row) if tagger is not None else None
        said.append(max(1, round(estimate.within(0, one.max_tokens).mean)) if estimate is not None else 0)
    return said


def record(engine: Any, asked: list[Asked], expected: list[int], *, seconds_max: float) -> int:
    """Decodes everything that the time allows; how many requests ended."""
    from vllm import SamplingParams

    from services.worker.vllm_engine.continuation import EXPECTED_TOKENS

    began, added, done = time.monotonic(), 0, 0
    while (added < len(asked) and time.monotonic() - began < seconds_max) or engine.has_unfinished_requests():
        while added < len(asked) and added - done < WINDOW and time.monotonic() - began < seconds_max:
            one = asked[added]
            extra = {EXPECTED_TOKENS: expected[added]} if expected[added] else None
            sampling = SamplingParams(
                temperature=1.0,
                max_tokens=one.max_tokens,
                stop_token_ids=[EOS],
                detokenize=False,
                extra_args=extra,
                seed=added,
            )
            engine.add_request(f"{added}~0", {"prompt_token_ids": one.token_ids}, sampling)
            added += 1
        done += sum(output.finished for output in engine.step())
    return done


def main() -> None:
    """Records one model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="millrace-mini")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--count", type=int, default=6_000)
    parser.add_argument("--seed", type=int, default=21, help="not the 11 that the tagger was trained on")
    parser.add_argument("--seconds", type=float, default=500.0, help="no further request after so long")
    arguments = parser.parse_args()
    folder = ROOT / "models" / arguments.model
    output = arguments.output or Path(tempfile.gettempdir()) / f"{arguments.model}.states"
    config = WorkerConfig(
        name="record",
        model=arguments.model,
        model_path=str(folder),
        max_num_seqs=64,
        migration=MigrationConfig(enabled=False),
        engine_args={
            "worker_cls": "services.worker.vllm_engine.reading.ReadingCPUWorker",
            "scheduler_cls": "papers.ares.hidden_states.recording.RecordingScheduler",
            "additional_config": {"remaining": {"record": str(output), "every": 4}},
        },
    )
    asked = draw(arguments.count, arguments.seed, Tokenizer.from_file(str(folder / "tokenizer.json")))
    with engine_of(config) as engine:
        began = time.monotonic()
        done = record(engine, asked, tags(arguments.model, asked), seconds_max=arguments.seconds)
    print(f"{done} requests in {time.monotonic() - began:.0f} s: {output}")


if __name__ == "__main__":
    main()
