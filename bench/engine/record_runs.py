"""Records the planned runs on real vLLM, for tests/engine/test_model_fidelity.py.

``python -m bench.engine.record_runs [NAME ...]`` writes tests/engine/recordings/NAME.json, one file a run. Each run
has a process of its own, because an engine leaves state behind in its process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import msgspec
from millrace.contracts.ingress import FinishReason
from millrace.enginemodel.parameters import EngineParameters

from bench.engine.in_process import open_engine, prepare
from bench.engine.runs import PlannedRequest, PlannedRun, planned_runs
from tests.testbed.schedule_recording import RecordedRequest, RecordedRun, RecordedStep, prompt_tokens

RECORDINGS = Path(__file__).resolve().parents[2] / "tests" / "engine" / "recordings"
STEPS_MAX = 5000
TIME_MAX_S = 300


def main() -> None:
    """Records the runs named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--output", type=Path, default=RECORDINGS)
    options = parser.parse_args()
    runs = {run.name: run for run in planned_runs()}
    failed = [name for name in options.names or runs if not record_apart(runs[name], options.output)]
    sys.exit(f"not recorded: {', '.join(failed)}" if failed else 0)


def record_apart(run: PlannedRun, folder: Path) -> bool:
    """Records one run in a child process, which inherits the imported vLLM. Returns whether it succeeded."""
    prepare()
    import vllm.v1.engine.llm_engine  # noqa: F401 - here, once, and not in each child

    child = multiprocessing.get_context("fork").Process(target=lambda: write(record(run), folder))
    child.start()
    child.join(TIME_MAX_S)
    if child.is_alive():
        child.kill()
        child.join()
    print(f"{run.name}: {'recorded' if child.exitcode == 0 else 'failed'}", flush=True)
    return child.exitcode == 0


def record(run: PlannedRun) -> RecordedRun:
    """Runs it on vLLM."""
    prepare()
    import vllm

    with open_engine("nano", run.model, **engine_args(run.parameters)) as engine:
        _serve(engine, run.requests)
        scheduler = engine.engine_core.engine_core.scheduler
        return RecordedRun(
            name=run.name,
            about=run.about,
            engine=f"vllm {vllm.__version__}",
            parameters=run.parameters,
            requests=[_recorded(request, scheduler.seen[str(index)]) for index, request in enumerate(run.requests)],
            log=[(happening, int(name or 0)) for happening, name in scheduler.log],
            steps=[_step(*step) for step in scheduler.steps],
        )


def engine_args(parameters: EngineParameters) -> dict[str, Any]:
    """The same parameters in vLLM's words."""
    scheduler = "RecordingAsyncScheduler" if parameters.async_scheduling else "RecordingScheduler"
    return {
        "scheduler_cls": f"bench.engine.recording_scheduler.{scheduler}",
        "max_model_len": parameters.max_model_len,
        "block_size": parameters.block_size,
        "num_gpu_blocks_override": parameters.blocks_total + 1,
        "kv_cache_memory_bytes": 256 * 2**20,
        "max_num_seqs": parameters.max_sequences,
        "max_num_batched_tokens": parameters.token_budget,
        "long_prefill_token_threshold": parameters.long_prefill_token_threshold,
        "enable_chunked_prefill": parameters.chunked_prefill,
        "enable_prefix_caching": parameters.prefix_caching,
        "watermark": parameters.watermark,
        "scheduler_reserve_full_isl": parameters.reserve_full_prompt,
        "async_scheduling": parameters.async_scheduling,
    }


def _serve(engine: Any, requests: list[PlannedRequest]) -> None:
    """Adds, cancels and steps until everything has ended."""
    last = max(max(request.at_step, request.cancel_at_step or 0) for request in requests)
    for step in range(STEPS_MAX):
        if step > last and not engine.has_unfinished_requests():
            return
        for index, request in enumerate(requests):
            if request.at_step == step:
                _add(engine, str(index), request)
        gone = [str(index) for index, request in enumerate(requests) if request.cancel_at_step == step]
        if gone:
            engine.abort_request(gone)
        engine.step()
    raise RuntimeError(f"the run did not end within {STEPS_MAX} steps")


def _add(engine: Any, name: str, request: PlannedRequest) -> None:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=1.0,  # without a seed of its own: vLLM 0.32 on CPU fails on seeds where a prompt comes in chunks
        max_tokens=request.max_tokens,
        ignore_eos=True,
        stop_token_ids=list(range(6, 6 + request.stop_ids)),
        detokenize=False,
    )
    engine.add_request(
        name, {"prompt_token_ids": prompt_tokens(request.prompt)}, sampling, arrival_time=float(request.at_step)
    )


def _recorded(plan: PlannedRequest, request: Any) -> RecordedRequest:
    finish = {"FINISHED_STOPPED": FinishReason.STOP, "FINISHED_ABORTED": FinishReason.CANCELLED}
    return RecordedRequest(
        prompt=plan.prompt,
        max_tokens=plan.max_tokens,
        arrival=plan.at_step,
        output=list(request.output_token_ids),
        finish=finish.get(request.status.name, FinishReason.LENGTH),
    )


def _step(
    batch: list[tuple[str, int, int]], preempted: list[str], free: int, tables: int, waiting: int
) -> RecordedStep:
    triples = [(int(name), count, before) for name, count, before in batch]
    return RecordedStep(triples, [int(name) for name in preempted], free, tables, waiting)


def write(run: RecordedRun, folder: Path) -> None:
    """Writes a run as JSON with one step a line, so that a changed rule can be read in the diff."""
    folder.mkdir(parents=True, exist_ok=True)
    head = msgspec.json.encode(msgspec.structs.replace(run, steps=[])).decode().removesuffix('"steps":[]}')
    steps = ",\n".join(msgspec.json.encode(step).decode() for step in run.steps)
    text = (
        head.replace('"requests":[', '"requests":[\n').replace('},{"prompt"', '},\n{"prompt"')
        + f'"steps":[\n{steps}\n]}}\n'
    )
    (folder / f"{run.name}.json").write_text(text)


if __name__ == "__main__":
    main()
