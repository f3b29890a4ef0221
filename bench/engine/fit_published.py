"""Fits LinearStepTime to engines put together from published kernel tables, for sets that ship.

``python -m bench.engine.fit_published [NAME ...]`` rewrites ``coefficients/NAME.toml`` from the tables under
``MILLRACE_DATA`` (``../shared/data``). Steps are drawn as the engine would run them: decode batches of every size and
context, with and without prompt chunks; a third of them is held out and only judged. The tables hold GPU time, and the
host's share where it was measured; a real step is a little longer. A sum of linear terms cannot bend as a kernel table
does: the errors are the price of the form, not noise.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import msgspec
from millrace.contracts.status import BatchComposition
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_cost import FS_PER_NS, StepCost
from millrace.enginemodel.step_time_models import LinearStepTime, Provenance
from millrace.profiling.fitting import Errors, Sample, fit, held_out, judge
from millrace.profiling.writing import to_toml

from bench.published.engines import published

ROOT = Path(__file__).resolve().parents[2]
COEFFICIENTS = ROOT / "libs" / "millrace" / "enginemodel" / "coefficients"
STEPS = 3000
#: Kernel sums against 18 end-to-end runs of Llama-3.1-8B on one H100 (``python -m bench step_time --parts silicon``:
#: factor on kernels, ns of each step). Taken over for the other data-centre GPUs, of which there is no such run.
CALIBRATED = {"kernels": 1.07, "host": 0.87e6}
#: Where the time per token may change.
BENDS = (32, 64, 128, 192, 256, 384, 512, 1024)
SEED = 0


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """Range of batches that a set is fitted for.

    Attributes:
        decodes: Most sequences of a batch.
        context: Longest mean context, tokens.
        chunk: Most prompt tokens of a step.
        kv_tokens: That fit into the GPU's memory beside the weights.
        kernels: Factor on the sum of kernels, for the gaps between them.
        host: What each step takes beside kernels, ns.
    """

    decodes: int
    context: int
    chunk: int
    kv_tokens: int
    kernels: float = 1.0
    host: float = 0.0


RANGES = {
    "a30-llama-2-7b": Range(decodes=48, context=2048, chunk=2048, kv_tokens=16_832),
    "a30-qwen2-7b": Range(decodes=48, context=4096, chunk=2048, kv_tokens=116_624),
    "a100-llama-3-8b": Range(decodes=256, context=8192, chunk=2048, kv_tokens=430_000, **CALIBRATED),
    "h100-llama-2-7b": Range(decodes=256, context=4096, chunk=2048, kv_tokens=112_000, **CALIBRATED),
    "h100-llama-3-8b": Range(decodes=256, context=8192, chunk=8192, kv_tokens=430_000, **CALIBRATED),
    "h200-llama-3-8b": Range(decodes=256, context=8192, chunk=8192, kv_tokens=850_000, **CALIBRATED),
    "rtx4090-llama-3.1-8b": Range(decodes=256, context=4096, chunk=2048, kv_tokens=41_408),
}


def main(names: list[str]) -> None:
    """Fits, prints, writes."""
    for name in names or RANGES:
        model, provenance = fitted(name)
        text = to_toml(model, provenance)
        print(f"# {name}\n{text}")
        (COEFFICIENTS / f"{name}.toml").write_text(text)


def fitted(name: str) -> tuple[LinearStepTime, Provenance]:
    """The fit and where it comes from."""
    limits, tables = RANGES[name], published(name, data_folder())
    cost = tables.cost(EngineParameters(max_sequences=limits.decodes, token_budget=limits.chunk))
    training, rest = held_out(drawn(cost, limits, random.Random(SEED)), seed=SEED)
    model = fit(training, bends=BENDS, mixed=tables.mixed is not None)
    decodes = [sample for sample in rest if not sample[0].prefills]
    error = f"against the tables: {judge(model, rest).said()}; decode steps alone: {_short(judge(model, decodes))}"
    assert tables.provenance is not None
    source = f"{tables.provenance.source}{_calibrated(limits)}; bench.engine.fit_published {name}"
    return model, msgspec.structs.replace(tables.provenance, source=source, error=error)


def drawn(cost: StepCost, limits: Range, rng: random.Random) -> list[Sample]:
    """Steps within the limits, and what they cost, ns."""
    batches = [_batch(limits, rng) for _ in range(STEPS)]
    return [(batch, limits.host + limits.kernels * cost.duration_fs(batch) / FS_PER_NS) for batch in batches]


def _batch(limits: Range, rng: random.Random) -> BatchComposition:
    """Half of the steps have a prompt chunk, some of them with computed tokens before it."""
    decodes = rng.randint(1, limits.decodes)
    context = round(_spread(16, min(limits.context, limits.kv_tokens // decodes), rng))
    if rng.random() < 0.5:
        return BatchComposition(decodes=decodes, context_tokens=decodes * context, longest_context=context)
    chunk = round(_spread(16, limits.chunk - decodes, rng))
    before = rng.choice([0, 0, round(_spread(16, limits.context, rng))])
    return BatchComposition(
        decodes=decodes,
        prefills=1,
        prefill_tokens=chunk,
        context_tokens=decodes * context + before + chunk,
        prefill_work=chunk * (before + chunk / 2),
        prefill_context_tokens=before + chunk,
        longest_context=context,
    )


def _spread(least: float, most: float, rng: random.Random) -> float:
    """Evenly by logarithm."""
    return float(least * (max(most, least) / least) ** rng.random())


def _calibrated(limits: Range) -> str:
    if limits.kernels == 1.0 and limits.host == 0.0:
        return ""
    return (
        f"; kernels times {limits.kernels} and {limits.host / 1e6} ms of each step, from end-to-end runs of "
        "Llama-3.1-8B on an H100 (aiconfigurator's silicon samples)"
    )


def _short(errors: Errors) -> str:
    return f"mean absolute {errors.mean:.1%}, bias {errors.bias:+.1%}"


def data_folder() -> Path:
    """Return the folder of the measured tables."""
    return Path(os.environ.get("MILLRACE_DATA") or ROOT.parent / "shared" / "data")


if __name__ == "__main__":
    main(sys.argv[1:])
