"""Steps of the first hour on a GPU, in order of worth, and the reason why one cannot run on a machine. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import msgspec
from millrace.cli.machine_probes import MachineFacts

#: Below this a step cannot even start its engines, seconds.
STEP_SECONDS_MIN = 60
#: Two engines share the GPU: each its own KV, and a share of the memory that leaves room for the other.
SHARED_GPU = '{"kv_bytes": 2147483648, "engine_args": {"gpu_memory_utilization": 0.35}}'


class Need(StrEnum):
    """Precondition of a step."""

    GPU = "GPU"
    VLLM = "vLLM for CUDA"
    COPIER = "CUDA copier"


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement.

    Attributes:
        answers: The question that it answers.
        words: Arguments of the Python interpreter.
        seconds: Its limit.
        needs: What must be there.
    """

    name: str
    answers: str
    words: list[str]
    seconds: int
    needs: tuple[Need, ...] = ()


class PlannedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step and why it is skipped; empty where it runs."""

    step: Step
    skipped: str = ""


#: Cost of unequal lengths.
UNEQUAL = ("-m", "papers.cascadeinfer.bench.gpu_heterogeneity")


def steps(model: Path, out: Path) -> list[Step]:
    """Every step; together they stay below an hour.

    Args:
        model: Folder of the model that is served; moves and profiles use the shipped ones.
        out: Folder for files that a step writes.
    """
    bench, gpu = ["-m", "bench"], ["-m", "bench.gpu"]
    engine = (Need.GPU, Need.VLLM)
    serve = [gpu[0], f"{gpu[1]}.one_engine", "--model", str(model)]
    profile = ["-m", "millrace.cli", "profile", str(model), "--output", str(out / "step_time.toml")]
    moves = ["--contexts", "512", "2048", "--loads", "0", "4", "--moves", "5", "--worker-set", SHARED_GPU]
    kills = ["--rounds", "3", "--worker-set", SHARED_GPU]
    return [
        Step(name="machine", answers="what is here", words=["-m", "millrace.cli", "doctor"], seconds=60),
        Step(
            name="serve", answers="does vLLM serve through Millrace, how fast", words=serve, seconds=300, needs=engine
        ),
        Step(
            name="self-test",
            answers="may this engine move sequences with their KV",
            words=[*serve, "--self-test"],
            seconds=300,
            needs=engine,
        ),
        Step(
            name="migration",
            answers="how long a stream waits while it moves between two engines on this GPU",
            words=[*bench, "migration_gap", *moves],
            seconds=600,
            needs=engine,
        ),
        Step(
            name="copier",
            answers="how fast the CUDA copier reads another process's KV",
            words=[gpu[0], f"{gpu[1]}.copier"],
            seconds=180,
            needs=(Need.GPU, Need.COPIER),
        ),
        Step(name="step time", answers="how long a step takes", words=profile, seconds=600, needs=engine),
        Step(
            name="unequal lengths",
            answers="what one long sequence costs a decode batch",
            words=[
                "-m",
                "papers.cascadeinfer.bench.gpu_heterogeneity",
                "--seconds",
                "600",
                "--json",
                str(out / "unequal.json"),
            ],
            seconds=700,
            needs=(Need.GPU,),
        ),
        Step(
            name="continuation",
            answers="how long a stream pauses when its engine is killed",
            words=[*bench, "continuation_gap", *kills],
            seconds=420,
            needs=engine,
        ),
    ]


def planned(every: list[Step], facts: MachineFacts, copier: str) -> Iterator[PlannedStep]:
    """Each step with the reason why it is skipped.

    Args:
        every: In the order in which they run.
        facts: This machine.
        copier: Why the CUDA copier cannot run here; empty where it can.
    """
    missing = {
        Need.GPU: "" if facts.gpus else "there is no GPU (nvidia-smi lists none)",
        Need.VLLM: _without_vllm(facts),
        Need.COPIER: copier,
    }
    for step in every:
        reasons = [missing[need] for need in step.needs if missing[need]]
        yield PlannedStep(step=step, skipped="; ".join(reasons))


def _without_vllm(facts: MachineFacts) -> str:
    if not facts.vllm:
        return "vLLM is not installed"
    return "" if facts.vllm_build == "cuda" else f"vLLM {facts.vllm} is built for the CPU"
