"""Measures a saved model on held-out prompts: `python -m models.training.evaluate --size nano`.

Real decodings of the bf16 weights. For accuracy, greedily where there is one right answer: does the answer pass its
task's check? At temperature 1, several times per prompt, for lengths: how long are answers, and how much of their
variance lies within one prompt (chance) and between prompts (which a length predictor can learn). The result is written
beside the weights as JSON.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer

from models.training.checkpoint import load_model
from models.training.decode import Request, Sampling, generate
from models.training.model import Llama, parameter_count
from models.training.tasks import EXACT, LEVELS, TASKS, Example, held_out, make
from models.training.tokenizer import EOS, token_id
from models.training.train import MODELS, SIZES

PROMPTS_PER_LEVEL = 34
LENGTH_PROMPTS_PER_LEVEL = 4
LENGTH_SAMPLES = 5
# The longest right answers have about 2,000 tokens; what does not end by then has failed.
OUTPUT_TOKENS_MAX = 2048
DEFAULT_SEED = 11


def held_out_examples(rng: Random, per_level: int) -> list[Example]:
    """Draws so many held-out examples of every task and level; a task with few prompts repeats some."""
    examples = []
    for task in TASKS:
        for level in LEVELS:
            drawn: list[Example] = []
            while len(drawn) < per_level:
                example = make(task, rng, level)
                if held_out(example.prompt):
                    drawn.append(example)
            examples += drawn
    return examples


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The ids of a one-turn chat, as the chat template writes it."""
    return list(tokenizer.encode(f"<|user|>{prompt}<|eos|><|assistant|>").ids)


def answers(
    model: Llama, tokenizer: Tokenizer, examples: list[Example], temperature: float, seed: int
) -> list[list[int]]:
    """Decodes an answer to each example; a greedy one of an exact task as far as it is right."""
    requests = [answer_request(tokenizer, example, greedy=temperature == 0) for example in examples]
    generator = torch.Generator(model.model.embed_tokens.weight.device).manual_seed(seed)
    outputs: list[list[int]] = generate(model, requests, Sampling(temperature, token_id(tokenizer, EOS), generator))
    return outputs


def answer_request(tokenizer: Tokenizer, example: Example, *, greedy: bool) -> Request:
    """Build the request to decode for an example."""
    prompt = prompt_ids(tokenizer, example.prompt)
    if not greedy or example.task not in EXACT:
        return Request(prompt, OUTPUT_TOKENS_MAX)
    expected = tokenizer.encode(example.answer, add_special_tokens=False).ids
    return Request(prompt, len(expected) + 1, expected)


def measure_accuracy(model: Llama, tokenizer: Tokenizer, seed: int, per_level: int) -> dict[str, Any]:
    """Share of right answers per task, and per task and level: exact tasks greedily, noisy ones at temperature 1.

    Greedy decoding has no meaning for a noisy task: it never ends a run of dice, for one.
    """
    examples = held_out_examples(Random(seed), per_level)
    right: dict[str, dict[int, list[bool]]] = {task: {level: [] for level in LEVELS} for task in TASKS}
    for temperature, chosen in ((0.0, [e for e in examples if e.task in EXACT]),
                                (1.0, [e for e in examples if e.task not in EXACT])):  # fmt: skip
        for example, ids in zip(chosen, answers(model, tokenizer, chosen, temperature, seed), strict=True):
            right[example.task][example.level].append(example.check(tokenizer.decode(ids)))
    return {
        task: {
            "prompts": sum(map(len, levels.values())),
            "accuracy": statistics.mean(r for level in levels.values() for r in level),
            "by_level": [statistics.mean(level) for level in levels.values()],
        }
        for task, levels in right.items()
    }


def measure_lengths(model: Llama, tokenizer: Tokenizer, seed: int, per_level: int) -> dict[str, Any]:
    """Output lengths in tokens at temperature 1, the end of sequence counted; variance within and between prompts."""
    examples = held_out_examples(Random(seed), per_level)
    repeated = [example for example in examples for _ in range(LENGTH_SAMPLES)]
    decoded = answers(model, tokenizer, repeated, 1.0, seed)
    lengths = [len(ids) + 1 for ids in decoded]
    passed = [e.check(tokenizer.decode(ids)) for e, ids in zip(repeated, decoded, strict=True)]
    per_task = len(LEVELS) * per_level * LENGTH_SAMPLES
    measured = {
        task: _length_figures(lengths[i * per_task : (i + 1) * per_task], passed[i * per_task : (i + 1) * per_task])
        for i, task in enumerate(TASKS)
    }
    return {**measured, "all": _length_figures(lengths, passed)}


def _length_figures(lengths: list[int], passed: list[bool]) -> dict[str, float]:
    prompts = [lengths[i : i + LENGTH_SAMPLES] for i in range(0, len(lengths), LENGTH_SAMPLES)]
    ordered = sorted(lengths)
    within = statistics.mean(map(statistics.variance, prompts))
    # The variance of the prompts' sample means holds a share of the variance within prompts: take it off.
    between = statistics.variance(map(statistics.mean, prompts)) - within / LENGTH_SAMPLES
    return {
        "mean": statistics.mean(lengths),
        "p50": ordered[len(ordered) // 2],
        "p90": ordered[len(ordered) * 9 // 10],
        "max": ordered[-1],
        "within_prompt_variance": within,
        "between_prompt_variance": max(0.0, between),
        "accuracy": statistics.mean(passed),
    }


def evaluate(size: str, folder: Path, *, seed: int, per_level: int, length_per_level: int) -> dict[str, Any]:
    """Measures a model folder; every figure of its card that is not a plan."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = load_model(size, folder).to(torch.bfloat16).eval()
    accuracy = measure_accuracy(model, tokenizer, seed, per_level)
    return {
        "size": size,
        "parameters": parameter_count(model),
        "seed": seed,
        "accuracy": statistics.mean(accuracy[task]["accuracy"] for task in EXACT),
        "tasks": accuracy,
        "length_prompts": len(LEVELS) * length_per_level,
        "length_samples": LENGTH_SAMPLES,
        "lengths": measure_lengths(model, tokenizer, seed + 1, length_per_level),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--models", type=Path, default=MODELS, help="folder of the model folders")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    parser.add_argument("--per-level", type=int, default=PROMPTS_PER_LEVEL, help="prompts per task and level")
    parser.add_argument("--length-per-level", type=int, default=LENGTH_PROMPTS_PER_LEVEL)
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    folder, start = chosen.models / f"millrace-{chosen.size}", time.monotonic()
    result = evaluate(chosen.size, folder, seed=chosen.seed, per_level=chosen.per_level,
                      length_per_level=chosen.length_per_level)  # fmt: skip
    (folder / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{chosen.size}: accuracy {result['accuracy']:.3f} in {time.monotonic() - start:.0f} s")
    for task, figures in result["tasks"].items():
        print(f"{task:12} {figures['accuracy']:.2f}", " ".join(f"{share:.2f}" for share in figures["by_level"]))


if __name__ == "__main__":
    main()
