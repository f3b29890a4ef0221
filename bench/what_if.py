"""Gains that ``millrace what-if`` tells, against the same changes tried live on two real vLLM engines.

``--play NAME`` starts the cluster of a change, plays the load and keeps its recording; ``unchanged`` comes first.
Without it the recording of the unchanged cluster is asked, and its answers are compared with the other ones. Every
play has the same requests at the same times; the unchanged cluster gets more of them, and half of them are fitted.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from random import Random

import msgspec
import numpy as np
from millrace.workloads.recording import RecordedLoad, read_recording, write_recording

from bench.live.plan import Planned
from bench.live.play import play
from bench.results_pages import report
from simulator.whatif.answering import Asked, answers, asked, scratch_folder
from simulator.whatif.changes import AskedChange, recorded_cluster, with_instances, with_setting
from simulator.whatif.figures import ComparedFigure, Latencies, compared, of_recording
from tests.testbed.up_cluster import UpRig

#: Changes by name: options of `millrace up`, and the same as `what-if` takes them.
CHANGES: Mapping[str, tuple[str, ...]] = {
    "unchanged": (),
    "round-robin": ("policies.dispatch.name=round_robin",),
    "two-sequences": ("worker.max_num_seqs=2",),
    "small-chunks": ("worker.max_num_batched_tokens=128",),
    "bounded-steps": ("coordinator.step_bounds.tpot_s=0.015",),
    "one-instance": (),
}

#: Requests of every play, and of the unchanged cluster's, which is recorded for longer.
COUNT = 150
FIGURES = ("ttft_p50", "ttft_p99", "e2e_p50", "e2e_p99")

#: Sent before the load, one after the other.
WARM_UP = 12


def main() -> int:
    """Plays or reports."""
    parser = argparse.ArgumentParser(prog="python -m bench what_if", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of the recordings")
    parser.add_argument("--play", choices=list(CHANGES), action="append", default=[], help="try it live")
    parser.add_argument("--rate", type=float, default=2.5, help="requests/s (default %(default)s)")
    parser.add_argument("--count", type=int, default=800, help="requests of the unchanged cluster")
    parser.add_argument("--engine", default="vllm", help="or modelled, to try the bench")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.play:
        _play(name, options)
    if not options.play:
        _report(options.folder)
    return 0


def load(rate: float, count: int, seed: int) -> list[Planned]:
    """Poisson arrivals, log-normal prompts and outputs of stated length."""
    rng, at_s, found = Random(seed), 0.0, []
    for number in range(count):
        at_s += rng.expovariate(rate)
        words = max(4, min(220, round(rng.lognormvariate(math.log(45), 0.9))))
        prompt = " ".join(f"{rng.randrange(1000)}" for _ in range(words))
        tokens = max(2, min(250, round(rng.lognormvariate(math.log(45), 0.8))))
        found.append(Planned(at_s=at_s, prompt=prompt, max_tokens=tokens, stated=True, seed=number))
    return found


def _play(name: str, options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        words = ["--set", "telemetry.trace_sample=0", *(w for each in CHANGES[name] for w in ("--set", each))]
        rig = UpRig(
            Path(folder),
            model_path=Path("models/millrace-mini"),
            engine=options.engine,
            instances=1 if name == "one-instance" else 2,
            extra=words,
        )
        rig.start()
        try:
            warm = [msgspec.structs.replace(each, at_s=0.5 * n) for n, each in enumerate(load(1.0, WARM_UP, 999))]
            asyncio.run(play(warm, port=rig.port, model=rig.model))
            count = options.count if name == "unchanged" else COUNT
            before = os.getloadavg()[0]
            played = asyncio.run(play(load(options.rate, count, options.seed), port=rig.port, model=rig.model))
            failed = sum(bool(each.error) for each in played)
            print(f"{name}: {count} requests, {failed} failed, load average {before:.1f} to {os.getloadavg()[0]:.1f}")
            asyncio.run(asyncio.sleep(2.5))  # the recorder writes each second
        finally:
            rig.stop()
        whole = read_recording(Path(folder) / "recording")
        kept = msgspec.structs.replace(whole, requests=whole.requests[WARM_UP:])
        write_recording(options.folder / f"{name}.jsonl.gz", kept.rows())
        shutil.copy(Path(folder) / "run" / "cluster.toml", options.folder / f"{name}.toml")


def _report(folder: Path) -> None:
    base = read_recording(folder / "unchanged.jsonl.gz")
    cluster = recorded_cluster(base)
    with scratch_folder() as scratch:
        question = asked(base, cluster, Path(scratch))
        _tell_fidelity(question)
        tried = [name for name in CHANGES if name != "unchanged" and (folder / f"{name}.jsonl.gz").is_file()]
        changes = [_change(name, question) for name in tried]
        within = 0
        for name, answer in zip(tried, answers(question, changes, speed=1.0, jobs=1), strict=True):
            live = _live(base, read_recording(folder / f"{name}.jsonl.gz"))
            within += _tell_change(name, answer.figures, live)
        print(f"told within 30 % of the measured change, or within 5 points: {within} of {4 * len(tried)} figures")
        report("changes", f"{within} of {4 * len(tried)} figures told within 30 % or 5 points of the measured change")


def _change(name: str, question: Asked) -> AskedChange:
    spec = question.fitted.spec
    return with_instances(spec, 1) if name == "one-instance" else with_setting(spec, " ".join(CHANGES[name]))


def _live(base: RecordedLoad, changed: RecordedLoad) -> dict[str, ComparedFigure]:
    """The same requests on both clusters."""
    before, after = (of_recording([row for _, row in each.requests][:COUNT]) for each in (base, changed))
    size = min(len(before.e2e), len(after.e2e))
    mask = np.arange(size) < size
    return compared(_first(before, mask), _first(after, mask))


def _first(latencies: Latencies, mask: np.ndarray) -> Latencies:
    return msgspec.structs.replace(
        latencies, **{name: getattr(latencies, name)[: len(mask)] for name in latencies.__struct_fields__}
    )


def _tell_fidelity(question: Asked) -> None:
    print(f"{question.file.count} requests; second half, recorded and replayed, ms")
    for name, figure in question.fidelity.items():
        print(
            f"  {name:<10}{figure.before:>9.1f}{figure.after:>9.1f}{figure.ratio - 1:>+8.1%}"
            f"  [{figure.low - 1:+.1%}, {figure.high - 1:+.1%}]"
        )
    told = question.fidelity
    report("fidelity", ", ".join(f"{name} {told[name].ratio - 1:+.1%}" for name in FIGURES))


def _tell_change(name: str, told: Mapping[str, ComparedFigure], live: Mapping[str, ComparedFigure]) -> int:
    print(f"{name}: told, measured")
    right = 0
    for figure in FIGURES:
        said, was = told[figure], live[figure]
        gain, real = said.ratio - 1, was.ratio - 1
        close = abs(gain - real) <= max(0.05, 0.3 * abs(real))
        right += close
        print(
            f"  {figure:<10}{gain:>+8.1%} [{said.low - 1:+.1%}, {said.high - 1:+.1%}]"
            f"{real:>+9.1%} [{was.low - 1:+.1%}, {was.high - 1:+.1%}]{'' if close else '  off'}"
        )
    return right


if __name__ == "__main__":
    raise SystemExit(main())
