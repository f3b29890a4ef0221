"""Records what the shipped judge says about the shipped models' answers, on real vLLM, and calibrates it.

``python -m bench.judged.record_verdicts`` asks the three models for the first 600 prompts of answers.jsonl.gz again,
since that recording has no texts, and the judge about each answer, by the text that the judge service asks. It writes
bench/judged/recordings/verdicts.jsonl.gz, a prompt a line, by model: whether the answer is right, the sum of its
log-probabilities in thousandths, its tokens, the judge's share of "yes", and the tokens that the judge read; and the
calibration in the judge's folder.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from millrace.judging.calibration import area_under_curve, calibration_error, fit_isotonic
from millrace.judging.files import LlmCalibration, write_llm_judge
from millrace.judging.question import NO, YES, judging_question
from millrace.kvcopy.weights import weights_fingerprint
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bench.engine.in_process import open_engine, prepare
from bench.judged.record import MODELS, ROOT, answer, draw
from models.training.tokenizer import token_id

JUDGE = ROOT / "models" / "millrace-judge"
PATH = Path(__file__).parent / "recordings" / "verdicts.jsonl.gz"
SEED, REQUESTS = 23, 600
TOP_TOKENS = 20


def verdicts(questions: list[list[int]], words: tuple[int, int]) -> tuple[list[float | None], float]:
    """Share of "yes" for each question, None where neither word is among the likeliest; and seconds in all."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, logprobs=TOP_TOKENS)
    arguments = {"model": str(JUDGE), "load_format": "auto", "max_model_len": 4096, "enable_prefix_caching": False}
    shares: list[float | None] = [None] * len(questions)
    with open_engine("mini", **arguments, max_num_seqs=64, kv_cache_memory_bytes=256 * 2**20, seed=0) as engine:
        for index, tokens in enumerate(questions):
            engine.add_request(str(index), {"prompt_token_ids": tokens}, sampling)
        began = time.process_time()
        while engine.has_unfinished_requests():
            for output in engine.step():
                row = output.outputs[0].logprobs[0]
                no, yes = (math.exp(row[word].logprob) if word in row else 0.0 for word in words)
                if yes + no > 0:
                    shares[int(output.request_id.partition("-")[0])] = yes / (yes + no)
        return shares, time.process_time() - began


def calibrate(rows: list[dict[str, Any]]) -> LlmCalibration:
    """Curves of each model's answers and of all; area and error are of the halves that curves were not fitted to."""
    every = [_known(rows, [model]) for model in MODELS]
    shares, right = _known(rows, MODELS)
    found = []
    for known, truth in every:
        halves = np.array_split(np.random.default_rng(SEED).permutation(len(known)), 2)
        found += [(fit_isotonic(known[a], truth[a]).at(known[b]), truth[b]) for a, b in (halves, halves[::-1])]
    return LlmCalibration(
        curve=fit_isotonic(shares, right),
        curves={model: fit_isotonic(*of_model) for model, of_model in zip(MODELS, every, strict=True)},
        judged=list(MODELS),
        answers=len(shares),
        area=float(np.mean([area_under_curve(scores, truth) for scores, truth in found])),
        error=float(np.mean([calibration_error(scores, truth) for scores, truth in found])),
        fingerprint=weights_fingerprint(JUDGE),
    )


def _known(rows: list[dict[str, Any]], models: Sequence[str]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Shares of "yes" about these models' answers, and whether those are right."""
    told = [row[model] for row in rows for model in models if row[model]["yes"] is not None]
    return np.array([each["yes"] for each in told]), np.array([each["right"] for each in told])


def read_verdicts() -> list[dict[str, Any]]:
    """The recording."""
    with gzip.open(PATH, "rt") as lines:
        return [json.loads(line) for line in lines]


def main() -> None:
    """Records all models' answers, then the judge's verdicts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    prepare(options.threads)
    tokenizer = Tokenizer.from_file(str(ROOT / "models" / MODELS[0] / "tokenizer.json"))
    examples = draw(REQUESTS, SEED)
    texts = [f"<|bos|><|user|>{example.prompt}<|eos|><|assistant|>" for example in examples]
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    told = {model: answer(model, prompts, options.threads) for model in MODELS}
    rows: list[dict[str, Any]] = [{} for _ in examples]
    words = (token_id(tokenizer, NO), token_id(tokenizer, YES))
    for model in MODELS:
        answered = [tokenizer.decode(one["tokens"], skip_special_tokens=True) for one in told[model]]
        asked = [judging_question(text, said) for text, said in zip(texts, answered, strict=True)]
        questions = [
            tokenizer.encode(f"<|bos|><|user|>{text}<|eos|><|assistant|>", add_special_tokens=False).ids
            for text in asked
        ]
        shares, spent_s = verdicts(questions, words)
        for row, example, said, one, share, question in zip(
            rows, examples, answered, told[model], shares, questions, strict=True
        ):
            row[model] = {
                "right": example.check(said),
                "logprob": sum(one["logprobs"]),
                "output_tokens": len(one["tokens"]),
                "yes": share,
                "judge_tokens": len(question),
            }
        unknown = shares.count(None)
        print(f"{model}: {1000 * spent_s / len(shares):.2f} ms of CPU a verdict, {unknown} without", flush=True)
    write_llm_judge(JUDGE, calibrate(rows))
    with PATH.open("wb") as file, gzip.GzipFile(fileobj=file, mode="wb", mtime=0, filename="") as out:
        for row in rows:
            out.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
    print(f"{PATH.relative_to(ROOT)}: {PATH.stat().st_size} bytes")


if __name__ == "__main__":
    main()
