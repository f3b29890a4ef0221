"""Gains that ``millrace what-if`` tells, against the same changes tried live on two vLLM engines, or modelled ones.

``--play NAME`` starts the cluster of a change, plays the load and keeps its recording; ``unchanged`` comes first.
Without it the recording of the unchanged cluster is asked, and its answers are compared with the other ones. Every
play has the same requests at the same times; the unchanged cluster gets more of them, and half of them are fitted. A
change is measured against the unchanged cluster played directly before it: a shared machine's speed drifts.
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
from millrace.workloads.recording import RecordedLoad, read_recording, write_recording

from bench.live.plan import Planned
from bench.live.play import play
from bench.results_pages import report
from simulator.whatif.answering import Asked, answers, asked
from simulator.whatif.changes import AskedChange, recorded_cluster, with_instances, with_setting
from simulator.whatif.figures import ComparedFigure, compared, of_recording
from tests.testbed.up_cluster import UpRig

#: Changes by name: options of `millrace up`, and the same as `what-if` takes them.
CHANGES: Mapping[str, str] = {
    "unchanged": "",
    "round-robin": "policies.dispatch.name=round_robin",
    "shortest-queue": "policies.dispatch.name=join_shortest_queue",
    "at-random": "policies.dispatch.name=random",
    "two-sequences": "worker.max_num_seqs=2",
    "four-sequences": "worker.max_num_seqs=4",
    "small-chunks": "worker.max_num_batched_tokens=128",
    "smaller-chunks": "worker.max_num_batched_tokens=64",
    "bounded-steps": "coordinator.step_bounds.tpot_s=0.015",
    "balance": "policies.trading.name=delay",
    "no-prefixes": "worker.enable_prefix_caching=false",
    "one-instance": "",
    "three-instances": "",
}
INSTANCES = {"one-instance": 1, "three-instances": 3}

#: Requests of every play, and of the unchanged cluster's, which is recorded for longer.
COUNT = 150
FIGURES = ("ttft_p50", "ttft_p99", "e2e_p50", "e2e_p99", "e2e_mean")

#: Sent before the load, one after the other.
WARM_UP = 12


def main() -> int:
    """Plays or reports."""
    parser = argparse.ArgumentParser(prog="python -m bench what_if", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of the recordings")
    parser.add_argument("--play", choices=list(CHANGES), action="append", default=[], help="try it live")
    parser.add_argument("--rate", type=float, default=2.5, help="requests/s (default %(default)s)")
    parser.add_argument("--count", type=int, default=800, help="requests of the unchanged cluster")
    parser.add_argument("--engine", default="vllm", help="or modelled")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.play:
        if name == "unchanged":
            _play(name, name, options.count, options)
        else:
            _play("unchanged", _before(name), COUNT, options)
            _play(name, name, COUNT, options)
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


def _before(name: str) -> str:
    return f"{name}-before"


def _play(name: str, file: str, count: int, options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        words = ["--set", "telemetry.trace_sample=0", *(("--set", CHANGES[name]) if CHANGES[name] else ())]
        rig = UpRig(
            Path(folder),
            model_path=Path("models/millrace-mini"),
            engine=options.engine,
            instances=INSTANCES.get(name, 2),
            extra=words,
        )
        rig.start()
        try:
            warm = [msgspec.structs.replace(each, at_s=0.5 * n) for n, each in enumerate(load(1.0, WARM_UP, 999))]
            asyncio.run(play(warm, port=rig.port, model=rig.model))
            before = os.getloadavg()[0]
            played = asyncio.run(play(load(options.rate, count, 1), port=rig.port, model=rig.model))
            failed = sum(bool(each.error) for each in played)
            print(f"{file}: {count} requests, {failed} failed, load average {before:.1f} to {os.getloadavg()[0]:.1f}")
            asyncio.run(asyncio.sleep(2.5))  # the recorder writes each second
        finally:
            rig.stop()
        whole = read_recording(Path(folder) / "recording")
        kept = msgspec.structs.replace(whole, requests=whole.requests[WARM_UP:])
        write_recording(options.folder / f"{file}.jsonl.gz", kept.rows())
        shutil.copy(Path(folder) / "run" / "cluster.toml", options.folder / f"{file}.toml")


def _report(folder: Path) -> None:
    base = read_recording(folder / "unchanged.jsonl.gz")
    cluster = recorded_cluster(base)
    with tempfile.TemporaryDirectory() as scratch:
        question = asked(base, cluster, Path(scratch))
        _tell_fidelity(question)
        tried = [name for name in CHANGES if name != "unchanged" and (folder / f"{name}.jsonl.gz").is_file()]
        changes = [_change(name, question) for name in tried]
        right, lost = 0, []
        for name, answer in zip(tried, answers(question, changes, speed=1.0, jobs=1), strict=True):
            live = _live(*(read_recording(folder / f"{file}.jsonl.gz") for file in (_before(name), name)))
            right += _tell_change(name, answer.figures, live)
            lost += [f"{name} {f}" for f in FIGURES if answer.figures[f].ratio < 0.95 and live[f].ratio > 1]
        told = f"{right} of {len(tried)} within 30 % or 5 points of the measured change of mean end-to-end time"
        told += f"; gains over 5 % that were losses: {', '.join(lost) or 'none'}"
        print(told)
        report("changes", told)


def _change(name: str, question: Asked) -> AskedChange:
    spec = question.fitted.spec
    return with_instances(spec, INSTANCES[name]) if name in INSTANCES else with_setting(spec, CHANGES[name])


def _live(base: RecordedLoad, changed: RecordedLoad) -> dict[str, ComparedFigure]:
    """The same requests on both clusters."""
    rows = [[row for _, row in each.requests][:COUNT] for each in (base, changed)]
    before, after = (of_recording(each[: min(map(len, rows))]) for each in rows)
    return compared(before, after)


def _tell_fidelity(question: Asked) -> None:
    print(f"{question.file.count} requests; second half, recorded and replayed, ms")
    for name, figure in question.fidelity.items():
        print(f"  {name:<10}{figure.before:>9.1f}{figure.after:>9.1f}{_cell(figure)}")
    told = question.fidelity
    report("fidelity", ", ".join(f"{name} {told[name].ratio - 1:+.1%}" for name in FIGURES))


def _tell_change(name: str, told: Mapping[str, ComparedFigure], live: Mapping[str, ComparedFigure]) -> bool:
    """Prints each figure; returns whether the last one was told right."""
    print(f"{name}: told, measured")
    for figure in FIGURES:
        said, was = told[figure], live[figure]
        right = abs(said.ratio - was.ratio) <= max(0.05, 0.3 * abs(said.ratio - 1))
        print(f"  {figure:<10}{_cell(said)}{_cell(was)}{'' if right else '  off'}")
    return right


def _cell(figure: ComparedFigure) -> str:
    return f"{figure.ratio - 1:>+9.1%} [{figure.low - 1:+.1%}, {figure.high - 1:+.1%}]"


if __name__ == "__main__":
    raise SystemExit(main())
