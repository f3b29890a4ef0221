"""Judged samples of the cascade benches: WildBench, easy to hard, in halves to plan on and to be judged by.

Scores and step times are of different models: no public data hold both of the same ones. GPT-4o's scores route and
grade alike, so the quality of routed answers is inflated.
"""

from __future__ import annotations

import csv
from functools import cache

import numpy as np
from millrace.cascade.chain import NS
from millrace.cascade.sample import Floats, Integers, JudgedSample

from papers.cascadia.bench.cascade_models import DATA, MODEL_LEN_MAX

#: Characters per token, to turn WildBench's output lengths into tokens: assumed, its texts are not here.
CHARACTERS_PER_TOKEN = 4.0
#: Log-normal prompt lengths, tokens: assumed, WildBench's prompts are not here.
PROMPT_MEDIAN, PROMPT_SIGMA = 700.0, 1.0
THREE = ("gemma-2b-it", "reka-flash-20240226", "Qwen1.5-72B-Chat")
PAIR = ("Phi-3-mini-128k-instruct", "Qwen1.5-72B-Chat")

#: Share of all requests that an easy or a hard trace has: those on which nine models score best or worst on average.
TRACE_SHARE = 0.5
TRACES = ("easy", "mixed", "hard")

NOTE = (
    "Step times and scores are published ones of DIFFERENT models (scores: WildBench, {}; GPT-4o routes and grades). "
    "Prompt lengths are assumed."
)


@cache
def _rows() -> list[dict[str, str]]:
    path = DATA / "wildbench_judge_scores" / "wildbench_v2.0522_gpt4o_scores.csv"
    return list(csv.DictReader(path.open(encoding="utf-8")))


def wildbench(seed: int = 0, models: tuple[str, ...] = THREE) -> JudgedSample:
    """WildBench's 763 conversations as answered by some models, smallest first."""
    rows, rng = _rows(), np.random.default_rng(seed)
    quality = np.array([[10 * float(row[f"score_{name}"]) for name in models] for row in rows])
    outputs = np.array([[float(row[f"output_chars_{name}"]) / CHARACTERS_PER_TOKEN for name in models] for row in rows])
    prompts = np.exp(rng.normal(np.log(PROMPT_MEDIAN), PROMPT_SIGMA, len(rows)))
    half = MODEL_LEN_MAX // 2
    return JudgedSample(
        scores=quality[:, :-1],
        quality=quality,
        prompt_tokens=np.repeat(np.clip(prompts, 1, half).astype(np.int64)[:, None], len(models), axis=1),
        output_tokens=np.clip(outputs, 1, half - 1).astype(np.int64),
    )


def ease(without: tuple[str, ...] = ()) -> Floats:
    """Mean score of each conversation over all nine models but some."""
    names = [name for name in _rows()[0] if name.startswith("score_") and name.removeprefix("score_") not in without]
    return np.array([np.mean([float(row[name]) for name in names]) for row in _rows()])


def trace_rows(name: str) -> Integers:
    """Conversations of an easy, mixed or hard trace."""
    order = np.argsort(ease(), kind="stable")
    count = int(len(order) * TRACE_SHARE)
    return {"easy": order[-count:], "hard": order[:count], "mixed": np.arange(len(order))}[name]


def trace(name: str, seed: int, models: tuple[str, ...]) -> JudgedSample:
    """An easy, mixed or hard trace."""
    return wildbench(seed, models).rows(trace_rows(name))


def halves(sample: JudgedSample, seed: int) -> tuple[JudgedSample, JudgedSample]:
    """To plan on, and to be judged by."""
    planned, held_out = halves_of(sample.count, seed)
    return sample.rows(planned), sample.rows(held_out)


def halves_of(count: int, seed: int) -> tuple[Integers, Integers]:
    """Positions of the requests to plan on, and of those to be judged by."""
    planned, held_out = np.array_split(np.random.default_rng([seed, 1]).permutation(count), 2)
    return planned, held_out


def poisson(rate: float, count: int, seed: int) -> list[int]:
    """Arrivals, ns."""
    gaps = np.random.default_rng([seed, 2]).exponential(1 / rate, count)
    return [int(at * NS) for at in np.cumsum(gaps)]
