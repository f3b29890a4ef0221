"""Fits the length distributions that ship (libs/millrace/workloads/fitted) to the traces in MILLRACE_DATA."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from random import Random

import numpy as np
from millrace.workloads.lengths import FittedLengths
from millrace.workloads.readers import READERS, servegen
from millrace.workloads.shape import RequestShape
from scipy.stats import norm, rankdata

#: Name -> (format, path in the data folder, source).
TRACES = {
    "sharegpt": (
        "sharegpt",
        "sharegpt_block_10k/sharegpt_val_10k_llama2.csv",
        "ShareGPT, 10,000 requests of Block's evaluation, Llama-2 tokens (AKafakA/vidur_opt_scheduler, MIT)",
    ),
    "azure-conversation": (
        "azure",
        "azure_llm_2023/AzureLLMInferenceTrace_conv.csv",
        "Azure LLM inference trace 2023, conversation (Azure/AzurePublicDataset, CC-BY-4.0)",
    ),
    "azure-code": (
        "azure",
        "azure_llm_2023/AzureLLMInferenceTrace_code.csv",
        "Azure LLM inference trace 2023, code (Azure/AzurePublicDataset, CC-BY-4.0)",
    ),
    "mooncake-conversation": (
        "mooncake",
        "mooncake_fast25/conversation_trace.jsonl",
        "Mooncake FAST'25 conversation trace (kvcache-ai/Mooncake, Apache-2.0); without its shared prefixes",
    ),
    "arxiv-summarization": (
        "sharegpt",
        "arxiv_summarization_lengths/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv",
        "arXiv summarisation, Llama-2 tokens (microsoft/vidur, MIT)",
    ),
    "servegen-deepseek-r1": (
        "servegen",
        "servegen_deepseek_r1",
        "ServeGen, DeepSeek-R1, 12 largest clients from 10:00 (alibaba/ServeGen, Apache-2.0); prompt and output "
        "independent within a client",
    ),
}
SHARES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.975, 0.99, 0.995, 0.999, 1.0)


def main() -> int:
    """Fits and prints; writes the files with ``--write``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write a file for each set there")
    options = parser.parse_args()
    data = Path(os.environ.get("MILLRACE_DATA", "../shared/data"))
    for name, (form, path, source) in TRACES.items():
        shapes = _shapes(form, data / path)
        fitted = fit(shapes, source)
        print(f"{name:<24} {len(shapes):>6} rows  correlation {fitted.correlation:+.2f}  {fitted.error}")
        if options.write is not None:
            (options.write / f"{name}.toml").write_text(_toml(fitted))
    return 0


def fit(shapes: list[RequestShape], source: str) -> FittedLengths:
    """Quantiles, and the correlation of the ranks as normal numbers."""
    prompts = np.array([shape.prompt_tokens for shape in shapes], dtype=np.float64)
    outputs = np.array([shape.output_tokens for shape in shapes], dtype=np.float64)
    normal = [norm.ppf(rankdata(values) / (values.size + 1)) for values in (prompts, outputs)]
    fitted = FittedLengths(
        source=f"{source}; bench.fit_lengths",
        error="to be found",
        shares=SHARES,
        prompt_tokens=tuple(float(round(value)) for value in np.quantile(prompts, SHARES)),
        output_tokens=tuple(float(round(value)) for value in np.quantile(outputs, SHARES)),
        correlation=round(float(np.corrcoef(*normal)[0, 1]), 3),
    )
    rng = Random(0)
    drawn = [fitted.draw(rng) for _ in range(50_000)]
    means = [np.mean([s.prompt_tokens for s in drawn]), np.mean([s.output_tokens for s in drawn])]
    error = (
        f"means of 50,000 draws against the trace: prompt {means[0] / prompts.mean() - 1:+.1%} "
        f"of {prompts.mean():.0f}, "
        f"output {means[1] / outputs.mean() - 1:+.1%} of {outputs.mean():.0f}; quantiles exact where they stand"
    )
    return FittedLengths(
        **{name: getattr(fitted, name) for name in fitted.__struct_fields__ if name != "error"}, error=error
    )


def _shapes(form: str, path: Path) -> list[RequestShape]:
    if form == "servegen":
        arrivals = servegen.read(path, Random(0), begin_s=36_000, count=40_000)
    else:
        arrivals = READERS[form](path)
    return [arrival.shape for arrival in arrivals]


def _toml(fitted: FittedLengths) -> str:
    lines = [f'source = "{fitted.source}"', f'error = "{fitted.error}"']
    lines.append(f"shares = [{', '.join(f'{share:g}' for share in fitted.shares)}]")
    for name in ("prompt_tokens", "output_tokens"):
        lines.append(f"{name} = [{', '.join(map(str, getattr(fitted, name)))}]")
    return "\n".join([*lines, f"correlation = {fitted.correlation}"]) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
