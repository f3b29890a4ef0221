"""Count of long streams whose text changes when they are computed again, by the length of the pieces that prompts are
computed in.

    python -m bench continuation_text --streams 200 --tokens 2400 --chunks 0 256

A real engine in this process, bfloat16. Half of the streams are greedy, half sampled with a seed at temperature 0.8.
Each is decoded whole; then, as after a kill, prompt and a part of the output are computed again and the rest decoded.
`--chunks` are bounds of vLLM's `long_prefill_token_threshold`; 0 is none.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from pathlib import Path
from typing import Any

from millrace.actor.engine import EngineSequence
from millrace.contracts.worker import Sampling

from services.worker.config import MigrationConfig, WorkerConfig

MODELS = Path(__file__).resolve().parent.parent / "models"
PROMPT_TOKENS = 64
#: Ids of ordinary tokens in the shipped models.
TOKENS = range(6, 690)


def decoded(engine: Any, sequences: list[EngineSequence]) -> dict[str, list[int]]:
    """New tokens of each sequence."""
    from services.worker.vllm_engine.sampling import sampling_params

    for each in sequences:
        tokens = [*each.prompt_token_ids, *each.output_token_ids]
        engine.add_request(each.sequence, {"prompt_token_ids": tokens}, sampling_params(each, time.time_ns()))
    found: dict[str, list[int]] = {each.sequence: [] for each in sequences}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] += output.outputs[0].token_ids
    return found


def opened(model: Path, streams: int) -> Any:
    """An engine as a worker's, without its process."""
    from vllm.v1.engine.llm_engine import LLMEngine

    from services.worker.vllm_engine import snapshot_buffer, startup

    config = WorkerConfig(
        name="bench",
        model="m",
        model_path=str(model),
        enable_prefix_caching=False,
        kv_bytes=1 << 30,
        max_num_seqs=min(streams, 64),
        migration=MigrationConfig(enabled=False),
    )
    arguments = startup.engine_args(config)
    path = snapshot_buffer.create()
    arguments.additional_config = startup.engine_settings(config, path)
    try:
        return LLMEngine.from_engine_args(arguments)
    finally:
        path.unlink()


def main() -> int:
    """Decodes, computes again, counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODELS / "millrace-mini")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=2400)
    parser.add_argument("--chunks", type=int, nargs="+", default=[0, 256])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    from services.worker.vllm_engine import environment

    environment.prepare()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch

    torch.set_num_threads(1)
    rng = random.Random(options.seed)
    engine = opened(options.model, options.streams)
    limits = engine.engine_core.engine_core.scheduler.scheduler_config
    streams = [
        EngineSequence(
            sequence=f"s{number}",
            prompt_token_ids=[rng.choice(TOKENS) for _ in range(PROMPT_TOKENS)],
            sampling=Sampling(
                max_tokens=options.tokens,
                ignore_eos=True,
                temperature=0.8 * (number % 2),
                seed=number if number % 2 else None,
            ),
        )
        for number in range(options.streams)
    ]
    expected = decoded(engine, streams)
    cuts = {each.sequence: rng.randrange(options.tokens // 10, options.tokens * 9 // 10) for each in streams}
    for chunk in options.chunks:
        limits.long_prefill_token_threshold = chunk
        began = time.process_time()
        rest = decoded(engine, [_continued(each, expected[each.sequence][: cuts[each.sequence]]) for each in streams])
        changed = [name for name, tokens in rest.items() if tokens != expected[name][cuts[name] :]]
        seeded = sum(int(name[1:]) % 2 for name in changed)
        print(
            f"pieces of at most {chunk or 'all'} tokens: {len(changed)} of {len(streams)} streams change "
            f"({len(changed) - seeded} greedy, {seeded} seeded), {time.process_time() - began:.0f} s of processor time",
            flush=True,
        )
    engine.engine_core.shutdown()
    return 0


def _continued(stream: EngineSequence, output: list[int]) -> EngineSequence:
    return EngineSequence(
        sequence=stream.sequence,
        prompt_token_ids=stream.prompt_token_ids,
        output_token_ids=output,
        sampling=stream.sampling,
    )
