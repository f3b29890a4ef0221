"""The plan of a first hour on a GPU: what runs where, and what time allows."""

from __future__ import annotations

from pathlib import Path

import pytest
from millrace.cli.machine_probes import GpuFact, MachineFacts

from bench.gpu.first_hour import StepResult, carried_out
from bench.gpu.steps import PlannedStep, Step, planned, steps

EVERY = steps(Path("/m"), Path("/o"))
GPU = GpuFact(index=0, name="H100", memory_mib=81_559)


def facts(*, gpus: list[GpuFact], vllm: str = "0.32.0", build: str = "cuda") -> MachineFacts:
    return MachineFacts(
        python="3.11",
        cores=16,
        memory_bytes=1 << 37,
        disk_free_bytes=1 << 36,
        shm_bytes=1 << 36,
        gpus=gpus,
        vllm=vllm,
        vllm_build=build,
    )


def skipped(facts: MachineFacts, copier: str = "") -> dict[str, str]:
    return {entry.step.name: entry.skipped for entry in planned(EVERY, facts, copier) if entry.skipped}


def test_with_a_gpu_every_step_runs_within_an_hour() -> None:
    assert skipped(facts(gpus=[GPU])) == {}
    assert sum(step.seconds for step in EVERY) <= 3600


def test_without_a_gpu_each_step_says_so_and_only_the_look_at_the_machine_runs() -> None:
    why = skipped(facts(gpus=[], build="cpu"), "not built")
    assert set(why) == {step.name for step in EVERY} - {"machine"}
    assert all("there is no GPU" in reason for reason in why.values())
    assert "not built" in why["copier"]
    assert "vLLM 0.32.0 is built for the CPU" in why["serve"]


@pytest.mark.parametrize(("vllm", "reason"), [("", "vLLM is not installed"), ("0.32.0", "is built for the CPU")])
def test_what_needs_no_vllm_runs_on_a_gpu_without_it(vllm: str, reason: str) -> None:
    why = skipped(facts(gpus=[GPU], vllm=vllm, build="cpu"))
    assert {step.name for step in EVERY} - set(why) == {"machine", "copier", "unequal lengths"}
    assert all(reason in each for each in why.values())


def test_no_step_begins_when_the_time_is_over_and_the_last_one_gets_what_is_left() -> None:
    plan = [PlannedStep(step=Step(name=name, answers="", words=[], seconds=100)) for name in ("a", "b", "c")]
    times = iter([0.0, 100.0, 180.0])
    given: list[float] = []

    def run(step: Step, seconds: float) -> StepResult:
        given.append(seconds)
        return StepResult(step=step.name, outcome="failed", why="it broke")

    results = list(carried_out(plan, until_s=175.0, run=run, now_s=lambda: next(times)))
    assert given == [100.0, 75.0]
    assert [result.outcome for result in results] == ["failed", "failed", "skipped"]
    assert results[2].why == "the hour is over"
