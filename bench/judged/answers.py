"""The recorded answers as arrays, and what an answer costs."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from millrace.enginemodel.coefficients import load_step_time
from numpy.typing import NDArray

PATH = Path(__file__).parent / "recordings" / "answers.jsonl.gz"
MODELS = ("millrace-nano", "millrace-micro", "millrace-mini")
STEP_TIMES = ("cpu-500k", "cpu-2m", "cpu-8m")

#: Sequences of the batch for which a decoded token is priced.
BATCH = 8


class Recorded(NamedTuple):
    """Answers of three models to N prompts.

    Attributes:
        prompts: N texts.
        tasks: N names.
        prompt_tokens: (N,).
        right: (N, 3).
        output_tokens: (N, 3).
        logprobs: By model, N lists.
    """

    prompts: list[str]
    tasks: list[str]
    prompt_tokens: NDArray[np.int64]
    right: NDArray[np.bool_]
    output_tokens: NDArray[np.int64]
    logprobs: tuple[list[list[float]], ...]


@cache
def recorded() -> Recorded:
    """Everything that was recorded."""
    with gzip.open(PATH, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    told = [[row["answers"][model] for model in MODELS] for row in rows]
    return Recorded(
        prompts=[row["prompt"] for row in rows],
        tasks=[row["task"] for row in rows],
        prompt_tokens=np.array([row["prompt_tokens"] for row in rows]),
        right=np.array([[each["right"] for each in row] for row in told]),
        output_tokens=np.array([[each["output_tokens"] for each in row] for row in told]),
        logprobs=tuple([[v / 1000 for v in row[i]["logprobs"]] for row in told] for i in range(len(MODELS))),
    )


@cache
def token_costs() -> NDArray[np.float64]:
    """Milliseconds of engine time per decoded token of each model, (3,), at a batch of BATCH; shipped CPU sets."""
    models = [load_step_time(name) for name in STEP_TIMES]
    return np.array([(model.fixed / BATCH + model.per_decode) / 1e6 for model in models])
