"""Fits LinearStepTime to published GPU figures, for modelled engines that should behave like a GPU.

``python -m bench.engine.fit_published`` rewrites a100-llama-3-8b.toml and h100-llama-2-7b.toml.

The anchors are whole steps put together from public kernel measurements: per-operator medians of Vidur's profiles
(linear layers, by number of tokens) and NVIDIA aiconfigurator's attention tables (decode attention per layer, by batch
and KV length). They hold GPU time only: no scheduling, no sampling, no launch gaps. A real step is a little longer.
A sum of linear terms cannot bend as a roofline does, so the errors below are the price of the form, not noise.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from millrace.contracts.status import BatchComposition
from millrace.enginemodel.steptime import LinearStepTime, Provenance

from bench.engine.fit_step_time import NAMES, non_negative, to_toml

COEFFICIENTS = Path(__file__).resolve().parents[2] / "libs" / "millrace" / "enginemodel" / "coefficients"
SOURCE = (
    "anchor steps composed of operator medians profiled by Vidur (microsoft/vidur) and attention tables of "
    "aiconfigurator (ai-dynamo/aiconfigurator); GPU time only; prompt attention from FLOPs at half of peak; "
    "bench.engine.fit_published"
)


class Anchors(msgspec.Struct, frozen=True, kw_only=True):
    """Published steps of one model on one GPU, ms.

    Attributes:
        decodes: (sequences, KV tokens of each) -> ms of a decode step.
        prefills: Tokens of a prompt chunk -> ms of the step's linear layers.
        attention_flop: Floating-point operations of prompt attention per token², all layers.
        peak_flops: Peak of the GPU, per second.
    """

    name: str
    model: str
    hardware: str
    decodes: dict[tuple[int, int], float]
    prefills: dict[int, float]
    attention_flop: float
    peak_flops: float


ANCHORS = [
    Anchors(
        name="a100-llama-3-8b",
        model="Llama-3-8B, bfloat16",
        hardware="one NVIDIA A100 80 GB",
        decodes={(1, 1024): 11.0, (32, 1024): 15.5, (64, 1024): 18.1, (128, 1024): 24.9, (32, 4096): 25.0},
        prefills={512: 34.6, 1024: 75.1, 2048: 141.8},
        attention_flop=4.0 * 4096 * 32,
        peak_flops=312e12,
    ),
    Anchors(
        name="h100-llama-2-7b",
        model="Llama-2-7B, float16",
        hardware="one NVIDIA H100 80 GB",
        decodes={(1, 1024): 6.2, (32, 1024): 11.9, (64, 1024): 17.4, (128, 1024): 28.9},
        prefills={512: 12.0, 1024: 21.0, 2048: 40.5},
        attention_flop=4.0 * 4096 * 32,
        peak_flops=989e12,
    ),
]


def main() -> None:
    """Fits, prints, writes."""
    for anchors in ANCHORS:
        text = to_toml(*fit(anchors))
        print(text)
        (COEFFICIENTS / f"{anchors.name}.toml").write_text(text)


def fit(anchors: Anchors) -> tuple[LinearStepTime, Provenance]:
    """Least squares of relative errors over the anchors; the prompt-attention term is computed, not fitted."""
    steps = [
        (BatchComposition(decodes=count, context_tokens=count * (context + 1)), ms)
        for (count, context), ms in anchors.decodes.items()
    ]
    steps += [
        (BatchComposition(prefills=1, prefill_tokens=tokens, context_tokens=tokens), ms)
        for tokens, ms in anchors.prefills.items()
    ]
    rows = np.array([[1.0, step.decodes, step.prefill_tokens, step.context_tokens] for step, _ in steps])
    times = np.array([ms * 1e6 for _, ms in steps])
    solution = non_negative(rows / times[:, None], np.ones(len(times)))
    errors = rows @ solution / times - 1.0
    work = anchors.attention_flop / (anchors.peak_flops / 2) * 1e9
    values = [float(f"{value:.4g}") for value in (*solution, work)]
    model = msgspec.convert(dict(zip(NAMES, values, strict=True)), LinearStepTime)
    said = ", ".join(
        f"{ms} ms {error:+.0%}" for (_, ms), error in zip(steps, (float(error) for error in errors), strict=True)
    )
    text = (
        f"mean absolute {float(np.abs(errors).mean()):.0%}, largest {float(np.abs(errors).max()):.0%}; anchors: {said}"
    )
    return model, Provenance(model=anchors.model, hardware=anchors.hardware, source=SOURCE, error=text)


if __name__ == "__main__":
    main()
