"""Conversations in simulation: forecasts know what each instance has cached, and place by it without being told to."""

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from millrace.actor.settings import with_settings
from millrace.enginemodel.step_time_models import LinearStepTime

from simulator.scenarios.reading import scenario_of
from simulator.scenarios.running import run_scenario
from simulator.scenarios.statistics import Summary, summarise

#: Tokens that one hash id of the trace stands for.
BLOCK = 512
SCENARIO: dict[str, Any] = {
    "seed": 5,
    "cluster": {
        "groups": [
            {
                "name": "gpu",
                "instances": 10,
                "step_time": "made-up",
                "engine": {
                    "max_model_len": 16_384,
                    "blocks_total": 2_000,
                    "max_sequences": 32,
                    "token_budget": 2_048,
                    "prefix_caching": True,
                },
            }
        ]
    },
    "dispatch": {"policy": "forecast", "parameters": {"candidates": 0}},
    "workload": {
        "count": 300,
        "arrivals": {"kind": "trace", "speed": 1.0},
        "lengths": {"kind": "trace", "format": "mooncake", "path": "turns.jsonl", "total_max": 16_000},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a trace of 60 conversations of five turns, each with all that was said before as its prompt."""
    rng, folder = random.Random(1), tmp_path_factory.mktemp("turns")
    rows: list[dict[str, Any]] = []
    ids = 0
    for _ in range(60):
        at_ms = rng.randrange(60_000)
        blocks: list[int] = []
        for _ in range(5):
            more = rng.randrange(1, 4)
            blocks += list(range(ids, ids + more))
            ids += more
            prompt = len(blocks) * BLOCK - rng.randrange(100)
            rows.append({"timestamp": at_ms, "input_length": prompt, "output_length": 40, "hash_ids": list(blocks)})
            at_ms += rng.randrange(4_000, 12_000)
    rows.sort(key=lambda row: row["timestamp"])
    (folder / "turns.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def step_times(_name: str) -> LinearStepTime:
    return LinearStepTime(fixed=5e6, per_decode=5e4, per_prefill_token=1e5, per_context_token=20.0)


@functools.cache
def told(folder: Path, *settings: str) -> Summary:
    spec = scenario_of(with_settings(SCENARIO, list(settings)))
    summary = summarise(run_scenario(spec, step_times=step_times, folders=(folder,)))
    assert summary.lost == 0
    return summary


def test_conversations_stay_where_they_are_cached_and_forecasts_are_right_about_it(folder: Path) -> None:
    knowing = told(folder)
    blind = told(folder, "cluster.predictor.prefixes=false")
    assert knowing.prefix_share > 2 * blind.prefix_share
    assert knowing.ttft_s.mean < 0.7 * blind.ttft_s.mean
    assert knowing.prefix_error is not None
    assert knowing.prefix_error < 0.02
    assert knowing.ttft_error.absolute < 0.5 * blind.ttft_error.absolute


def test_where_but_two_are_drawn_whoever_has_the_conversation_is_asked_too(folder: Path) -> None:
    all_, two = told(folder), told(folder, "dispatch.parameters.candidates=2")
    assert two.prefix_share > 0.8 * all_.prefix_share


def test_several_predictors_and_ingresses_hear_the_same(folder: Path) -> None:
    spread = told(folder, "cluster.predictors=3", "cluster.ingresses=2")
    assert spread.prefix_share > 0.9 * told(folder).prefix_share
    assert spread.prefix_error is not None
    assert spread.prefix_error < 0.02
