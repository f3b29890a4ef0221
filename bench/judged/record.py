"""Records what the three shipped models answer to the same held-out prompts, greedily, on real vLLM.

``python -m bench.judged.record`` writes bench/judged/recordings/answers.jsonl.gz, a prompt a line: task, level, prompt,
its tokens, and for each model whether the answer is right (the task's own check), its length (the end-of-sequence token
counted), finish reason, and the log-probability of each token in thousandths. Judges are calibrated on it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer

from bench.engine.in_process import open_engine, prepare
from models.training.tasks import TASKS, Example, held_out, make

ROOT = Path(__file__).resolve().parents[2]
PATH = Path(__file__).parent / "recordings" / "answers.jsonl.gz"
MODELS = ("millrace-nano", "millrace-micro", "millrace-mini")
EOS = 2
OUTPUT_TOKENS_MAX = 512


def draw(count: int, seed: int) -> list[Example]:
    """Held-out prompts of every task and level alike, each once."""
    rng, seen, found = Random(seed), set[str](), list[Example]()
    while len(found) < count:
        example = make(rng.choice(TASKS), rng)
        if held_out(example.prompt) and example.prompt not in seen:
            seen.add(example.prompt)
            found.append(example)
    return found


def answer(model: str, prompts: list[list[int]], threads: int) -> list[dict[str, Any]]:
    """Tokens, finish reason and log-probabilities of a model's answers, in the order of the prompts."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=OUTPUT_TOKENS_MAX, stop_token_ids=[EOS], detokenize=False, logprobs=0
    )
    arguments = {"model": str(ROOT / "models" / model), "load_format": "auto", "max_model_len": 4096}
    done: dict[int, dict[str, Any]] = {}
    with open_engine("mini", **arguments, max_num_seqs=64, kv_cache_memory_bytes=512 * 2**20, seed=0) as engine:
        for index, token_ids in enumerate(prompts):
            engine.add_request(str(index), {"prompt_token_ids": token_ids}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    done[int(output.request_id.partition("-")[0])] = _told(output.outputs[0])
    return [done[index] for index in range(len(prompts))]


def _told(choice: Any) -> dict[str, Any]:
    pairs = zip(choice.token_ids, choice.logprobs, strict=True)
    return {
        "tokens": list(choice.token_ids),
        "reason": choice.finish_reason,
        "logprobs": [round(1000 * row[token].logprob) for token, row in pairs],
    }


def main() -> None:
    """Records all models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=23)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    prepare(options.threads)
    tokenizer = Tokenizer.from_file(str(ROOT / "models" / MODELS[0] / "tokenizer.json"))
    asked = draw(options.requests, options.seed)
    texts = [f"<|bos|><|user|>{example.prompt}<|eos|><|assistant|>" for example in asked]
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    rows: list[dict[str, Any]] = [
        {
            "task": example.task,
            "level": example.level,
            "prompt": example.prompt,
            "prompt_tokens": len(token_ids),
            "answers": {},
        }
        for example, token_ids in zip(asked, prompts, strict=True)
    ]
    for model in MODELS:
        began = time.monotonic()
        for row, example, told in zip(rows, asked, answer(model, prompts, options.threads), strict=True):
            text = tokenizer.decode(told["tokens"], skip_special_tokens=True)
            row["answers"][model] = {
                "right": example.check(text),
                "output_tokens": len(told["tokens"]),
                "finish_reason": told["reason"],
                "logprobs": told["logprobs"],
            }
        right = sum(row["answers"][model]["right"] for row in rows)
        print(f"{model}: {right} of {len(rows)} right, {time.monotonic() - began:.0f} s", flush=True)
    PATH.parent.mkdir(exist_ok=True)
    with PATH.open("wb") as file, gzip.GzipFile(fileobj=file, mode="wb", mtime=0, filename="") as out:
        for row in rows:
            out.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
    print(f"{PATH.relative_to(ROOT)}: {PATH.stat().st_size} bytes")


if __name__ == "__main__":
    main()
