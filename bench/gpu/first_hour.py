"""The first hour on a GPU: what to measure there, in order of worth, each step bounded in time.

    python -m bench.gpu.first_hour --list              # what would run here, and why not
    python -m bench.gpu.first_hour --out first_hour    # a file per step, and summary.json

A step that cannot run says why and is left out; one that fails or takes too long does not stop the next ones. The exit
status is 1 where a step failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
from millrace.cli.machine_probes import look
from millrace.kvcopy.cuda_copier import why_not

from bench.gpu.steps import STEP_SECONDS_MIN, PlannedStep, Step, planned, steps
from bench.stamp import stamp

ROOT = Path(__file__).resolve().parents[2]
#: A step that is told to end stops the cluster that it started.
ENDING_S = 60.0


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a step: ``done``, ``failed``, ``time is up`` or ``skipped``."""

    step: str
    outcome: str
    why: str = ""
    seconds: float = 0.0
    output: str = ""


#: Runs a step within so many seconds; its result.
Run = Callable[[Step, float], StepResult]


def main() -> int:
    """Runs the steps and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("first_hour"), help="folder for outputs (default %(default)s)")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "millrace-mini", help="folder of a model")
    parser.add_argument("--seconds", type=float, default=3600.0, help="of all steps together (default %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these steps only, by name")
    parser.add_argument("--list", action="store_true", help="run nothing")
    options = parser.parse_args()
    out = options.out.absolute()
    chosen = [step for step in steps(options.model.absolute(), out) if step.name in (options.only or step.name)]
    plan = list(planned(chosen, look(ROOT, ()), why_not()))
    if options.list:
        for entry in plan:
            print(f"{entry.step.name:<16} {entry.step.seconds:>4} s  {entry.step.answers}: {entry.skipped or 'runs'}")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    print(stamp(), flush=True)
    results = []
    for result in carried_out(plan, until_s=time.monotonic() + options.seconds, run=lambda s, t: run_step(s, t, out)):
        print(
            f"{result.step:<16} {result.outcome:<10} {result.seconds:6.0f} s  {result.why or result.output}", flush=True
        )
        results.append(result)
    (out / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    return int(any(result.outcome == "failed" for result in results))


def carried_out(
    plan: Iterable[PlannedStep], *, until_s: float, run: Run, now_s: Callable[[], float] = time.monotonic
) -> Iterator[StepResult]:
    """Run what is not skipped, as long as there is time."""
    for entry in plan:
        left = until_s - now_s()
        if entry.skipped:
            yield StepResult(step=entry.step.name, outcome="skipped", why=entry.skipped)
        elif left < STEP_SECONDS_MIN:
            yield StepResult(step=entry.step.name, outcome="skipped", why="the hour is over")
        else:
            yield run(entry.step, min(left, entry.step.seconds))


def run_step(step: Step, seconds: float, out: Path) -> StepResult:
    """Run a step in a process group of its own; its output goes to a file."""
    file = out / f"{step.name.replace(' ', '_')}.txt"
    began = time.monotonic()
    with file.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *step.words], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        outcome, why = _awaited(process, seconds)
    return StepResult(
        step=step.name, outcome=outcome, why=why, seconds=round(time.monotonic() - began, 1), output=str(file)
    )


def _awaited(process: subprocess.Popen[bytes], seconds: float) -> tuple[str, str]:
    """Outcome and, where it is not ``done``, the reason."""
    try:
        status = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        _end(process)
        return "time is up", f"not done after {seconds:.0f} s"
    except BaseException:
        _end(process)
        raise
    return ("done", "") if status == 0 else ("failed", f"exit status {status}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the step itself to end, so that it stops what it started; then kill what is left of its group."""
    process.terminate()
    try:
        process.wait(timeout=ENDING_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
