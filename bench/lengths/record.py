"""Records how long the answers of a shipped model are, on real vLLM at temperature 1.

``python -m bench.lengths.record --model millrace-mini`` writes bench/lengths/recordings/MODEL.jsonl.gz, one request a
line in the form that ``millrace train tagger --requests`` reads. Prompts are drawn from the task family, every task and
level alike; one in ten repeats an earlier prompt. Lengths count the end-of-sequence token, as ingress does.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from bench.engine.in_process import open_engine, prepare
from models.training.data import SYSTEM_PROMPTS
from models.training.tasks import TASKS, make

ROOT = Path(__file__).resolve().parents[2]
RECORDINGS = Path(__file__).parent / "recordings"
EOS = 2
#: Share of requests whose prompt came before.
REPEATS = 0.1
#: Share of conversations with a system prompt, as in the models' training.
SYSTEM = 0.08
#: Clients' bounds, tokens, with how often each is drawn.
BOUNDS = ((256, 1), (1024, 2), (2048, 7))


class Asked(NamedTuple):
    """One request before it was decoded."""

    prompt: str
    token_ids: list[int]
    max_tokens: int


def draw(count: int, seed: int, tokenizer: Tokenizer) -> list[Asked]:
    """The requests of a seed."""
    rng = Random(seed)
    asked: list[Asked] = []
    for _ in range(count):
        prompt = rng.choice(asked).prompt if asked and rng.random() < REPEATS else _rendered(rng)
        bound = rng.choices([b for b, _ in BOUNDS], [w for _, w in BOUNDS])[0]
        asked.append(Asked(prompt, tokenizer.encode(prompt, add_special_tokens=False).ids, bound))
    return asked


def _rendered(rng: Random) -> str:
    system = f"<|system|>{rng.choice(SYSTEM_PROMPTS)}<|eos|>" if rng.random() < SYSTEM else ""
    return f"<|bos|>{system}<|user|>{make(rng.choice(TASKS), rng).prompt}<|eos|><|assistant|>"


def serve(engine: Any, asked: list[Asked]) -> dict[int, tuple[int, str]]:
    """Decodes everything; index -> (output tokens, finish reason)."""
    from vllm import SamplingParams

    for index, one in enumerate(asked):
        sampling = SamplingParams(temperature=1.0, max_tokens=one.max_tokens, stop_token_ids=[EOS], detokenize=False)
        engine.add_request(str(index), {"prompt_token_ids": one.token_ids}, sampling)
    done: dict[int, tuple[int, str]] = {}
    began = shown = time.monotonic()
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                choice = output.outputs[0]
                done[int(output.request_id.partition("-")[0])] = (len(choice.token_ids), choice.finish_reason)
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(f"{len(done)} of {len(asked)} after {shown - began:.0f} s", flush=True)
    return done


def main() -> None:
    """Records one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="millrace-mini")
    parser.add_argument("--requests", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    prepare(options.threads)
    folder = ROOT / "models" / options.model
    asked = draw(options.requests, options.seed, Tokenizer.from_file(str(folder / "tokenizer.json")))
    arguments = {"model": str(folder), "load_format": "auto", "max_model_len": 4096, "max_num_seqs": 64}
    with open_engine("mini", **arguments, kv_cache_memory_bytes=512 * 2**20, seed=options.seed) as engine:
        done = serve(engine, asked)
    path = RECORDINGS / f"{options.model}.jsonl.gz"
    with path.open("wb") as file, gzip.GzipFile(fileobj=file, mode="wb", mtime=0, filename="") as out:
        for index, one in enumerate(asked):
            tokens, reason = done[index]
            row = {"prompt": one.prompt, "prompt_tokens": len(one.token_ids), "max_tokens": one.max_tokens}
            out.write(json.dumps(row | {"output_tokens": [tokens], "finish_reasons": [reason]}).encode() + b"\n")
    print(f"{path.relative_to(ROOT)}: {len(asked)} requests, {sum(t for t, _ in done.values())} tokens")


if __name__ == "__main__":
    main()
