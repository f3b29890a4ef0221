"""Replays recorded requests through a modelled engine, and compares latencies with the recorded ones."""

from __future__ import annotations

import statistics

import msgspec
import numpy as np
from millrace.actor.engine import EngineSequence
from millrace.contracts.worker import Sampling
from millrace.enginemodel.engine import ModelledEngine
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_time_models import StepTimeModel


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """A request and when it got its tokens, s from the run's begin."""

    name: str
    prompt_tokens: int
    output_tokens: int
    arrived: float
    first: float = 0.0
    last: float = 0.0


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """Of all requests of a run, s."""

    ttft: list[float]
    tpot: list[float]
    e2e: list[float]


def latencies(requests: list[Recorded]) -> Latencies:
    """TPOT only of requests with more than one token."""
    return Latencies(
        ttft=[each.first - each.arrived for each in requests],
        tpot=[(each.last - each.first) / (each.output_tokens - 1) for each in requests if each.output_tokens > 1],
        e2e=[each.last - each.arrived for each in requests],
    )


def replay(requests: list[Recorded], model: StepTimeModel, parameters: EngineParameters) -> list[Recorded]:
    """The same requests with the times that the modelled engine gives them."""
    engine = ModelledEngine(parameters, model)
    waiting = sorted(requests, key=lambda each: each.arrived, reverse=True)
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    now_ns = 0
    while waiting or engine.scheduler.has_work():
        while waiting and waiting[-1].arrived * 1e9 <= now_ns:
            refusal = engine.add(_sequence(waiting.pop()))
            assert refusal is None, refusal
        duration_ns = engine.begin_step(now_ns)
        if duration_ns is None:
            now_ns = max(now_ns + 1, round(waiting[-1].arrived * 1e9))
            continue
        now_ns += duration_ns
        for output in engine.complete_step(now_ns, with_snapshot=False).outputs:
            first.setdefault(output.sequence, now_ns / 1e9)
            last[output.sequence] = now_ns / 1e9
    return [msgspec.structs.replace(each, first=first[each.name], last=last[each.name]) for each in requests]


def _sequence(request: Recorded) -> EngineSequence:
    """Prompts that share no block with each other."""
    salt = sum(ord(letter) * 31**place for place, letter in enumerate(request.name)) % 100_003
    prompt = [(salt * 7919 + place * 104_729) % 100_000 for place in range(request.prompt_tokens)]
    sampling = Sampling(max_tokens=request.output_tokens, ignore_eos=True)
    return EngineSequence(sequence=request.name, prompt_token_ids=prompt, sampling=sampling)


def comparison(measured: Latencies, modelled: Latencies) -> str:
    """A table: means and quantiles, and how far the model is off."""
    lines = [f"{'':<6}{'':<6}{'measured':>10}{'modelled':>10}{'off':>8}"]
    for name, scale, unit in (("ttft", 1.0, "s"), ("tpot", 1e3, "ms"), ("e2e", 1.0, "s")):
        real, model = getattr(measured, name), getattr(modelled, name)
        for word in ("mean", "p50", "p90", "p99"):
            a, b = (_statistic(values, word) * scale for values in (real, model))
            lines.append(f"{name:<6}{word:<6}{a:10.2f}{b:10.2f}{b / a - 1:+8.1%}  {unit}")
    return "\n".join(lines)


def _statistic(values: list[float], word: str) -> float:
    return statistics.fmean(values) if word == "mean" else float(np.percentile(values, int(word[1:])))
