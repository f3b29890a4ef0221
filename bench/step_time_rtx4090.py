"""The recorded run of 300 requests on an RTX 4090, replayed through the modelled engine. Nothing is fitted to it."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from millrace.enginemodel.coefficients import load_coefficients
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_time_models import StepTimeModel

from bench.published.engines import published
from bench.replaying_requests import Recorded, comparison, latencies, replay

#: As vLLM 0.19 was configured in that run; it counts its null block among its 2,588.
PARAMETERS = EngineParameters(
    max_model_len=32_768, block_size=16, blocks_total=2587, max_sequences=256, token_budget=2048, async_scheduling=True
)


def requests(data: Path) -> list[Recorded]:
    """The run: arrivals and first and last tokens by the engine's own clock."""
    file = data / "llmservingsim_rtx" / "RTX4090_Llama-3.1-8B_vllm_requests.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    begin = min(row["queued_ts"] for row in rows)
    return [
        Recorded(
            name=row["request_id"],
            prompt_tokens=row["input_toks"],
            output_tokens=row["output_toks"],
            arrived=row["queued_ts"] - begin,
            first=row["first_token_ts"] - begin,
            last=row["last_token_ts"] - begin,
        )
        for row in rows
    ]


def report(data: Path) -> None:
    """Both models of this GPU against the run."""
    recorded = requests(data)
    for name, model in (
        ("kernel tables", published("rtx4090-llama-3.1-8b", data)),
        ("linear, as it ships", load_coefficients("rtx4090-llama-3.1-8b")),
    ):
        _compare(name, model, recorded)


def _compare(name: str, model: StepTimeModel, recorded: list[Recorded]) -> None:
    modelled = replay(recorded, model, PARAMETERS)
    print(f"RTX 4090, Llama-3.1-8B, {len(recorded)} requests, {name}:")
    print(comparison(latencies(recorded), latencies(modelled)))
    each = [abs((b.last - b.arrived) / (a.last - a.arrived) - 1.0) for a, b in zip(recorded, modelled, strict=True)]
    print(f"each request's e2e: mean absolute error {statistics.fmean(each):.1%}\n")
