"""The live figures' pure parts: loads, step times out of snapshots, errors, orders, and the way into a scenario."""

from random import Random

import msgspec
import pytest
from millrace.actor.engine import EngineSequence
from millrace.contracts.observers import RequestFinished
from millrace.contracts.status import SequenceState, SequenceStatus, StatusSnapshot
from millrace.contracts.worker import Sampling
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.scripted import ScriptedEngine
from millrace.enginemodel.step_time_models import LinearStepTime, StepTimeModel

from bench.live.halves import fitted_on
from bench.live.plan import Load, planned
from bench.live.recording import Recording
from bench.live.replay import fits, trace_rows
from bench.live.step_fit import windows
from bench.live.transit import INTO_MIN, transit
from models.training.tasks import held_out
from tests.testbed.messages import plain, plain_record, plain_snapshot

MS = 1_000_000
LOAD = Load(kind="stated", count=40, rate_per_s=10.0, seed=3)
TRUTH = LinearStepTime(fixed=3e6, per_decode=2e5, per_prefill_token=6e4, per_context_token=500.0)
PARAMETERS = EngineParameters(max_model_len=2048, blocks_total=2048, max_sequences=64, token_budget=2048)
RECORD = plain_record(
    "w0", incarnation=5, engine="vllm", max_model_len=2048, max_sequences=64, token_budget=2048, blocks_total=2048
)


def run_of_an_engine(count: int, pace: StepTimeModel = TRUTH) -> tuple[list[StatusSnapshot], list[RequestFinished]]:
    """An engine that follows TRUTH and is looked at every 20 ms, and what became of its requests."""
    rng = Random(5)
    lengths = {f"r{n}.0": rng.randrange(2, 80) for n in range(count)}
    prompts = {f"r{n}.0": [n] * rng.randrange(5, 200) for n in range(count)}
    arrivals = sorted((rng.randrange(0, count * 30) * MS, n) for n in range(count))
    engine = ScriptedEngine(PARAMETERS, pace, output_length=lengths.__getitem__)
    snapshots, outcomes, first = [], [], {}
    now_ns = told_ns = 0
    while arrivals or engine.scheduler.running or engine.scheduler.waiting:
        while arrivals and (arrivals[0][0] <= now_ns or not (engine.scheduler.running or engine.scheduler.waiting)):
            at_ns, number = arrivals.pop(0)
            now_ns = max(now_ns, at_ns)
            first[f"r{number}.0"] = at_ns
            sampling = Sampling(max_tokens=1000, temperature=0.0)
            name = f"r{number}.0"
            tokens = {"prompt_token_ids": prompts[name], "sampling": sampling}
            assert engine.add(EngineSequence(sequence=name, arrival_ns=at_ns + MS, **tokens)) is None
        stepped, duration_ns = engine.step(now_ns) or (None, 0)
        now_ns += duration_ns
        ended = [output.sequence for output in stepped.outputs if output.finish is not None]
        outcomes += [outcome(s, first[s], now_ns, len(prompts[s]), lengths[s]) for s in ended]
        if now_ns - told_ns >= 20 * MS:
            told_ns = now_ns
            state = {name: getattr(engine.snapshot(now_ns), name) for name in _SHARED}
            snapshots.append(StatusSnapshot(instance="w0", incarnation=5, model="m", **state))
    return snapshots, outcomes


_SHARED = (
    *("step", "at_ns", "running", "waiting", "blocks_free", "blocks_total", "preemptions", "step_duration_ns"),
    "batch",
)


def outcome(sequence: str, at_ns: int, now_ns: int, prompt_tokens: int, output_tokens: int) -> RequestFinished:
    times = {"arrival_ns": at_ns, "placed_ns": at_ns + MS // 2, "ttft_ns": 5 * MS, "e2e_ns": now_ns - at_ns}
    times["predicted_e2e_ns"] = 2 * (now_ns - at_ns - MS // 2)
    tokens = {"prompt_tokens": prompt_tokens, "output_tokens": [output_tokens]}
    return plain(RequestFinished, request=sequence.removesuffix(".0"), **tokens, **times)


def recorded(count: int = 200, pace: StepTimeModel = TRUTH) -> Recording:
    snapshots, outcomes = run_of_an_engine(count, pace)
    run = {"policy": "round_robin", "load": LOAD, "round": 0, "capacity_per_s": 20.0, "machine": "", "began_ns": 0}
    return Recording(**run, instances=[RECORD], decisions=[], outcomes=outcomes, snapshots=snapshots, played=[])


def test_the_same_seed_plans_the_same_requests_of_prompts_held_out_from_training() -> None:
    requests = planned(LOAD)
    assert requests == planned(LOAD)
    assert requests != planned(msgspec.structs.replace(LOAD, seed=4))
    assert all(held_out(request.prompt) for request in requests)
    assert [request.at_s for request in requests] == sorted(request.at_s for request in requests)


def test_time_in_which_an_engine_may_have_been_idle_is_no_window() -> None:
    snapshots, _ = run_of_an_engine(40)
    alone = [snapshot for snapshot in snapshots if snapshot.running][:1]
    later = msgspec.structs.replace(alone[0], step=alone[0].step + 3, at_ns=alone[0].at_ns + 50 * MS, running=[])
    assert windows([*alone, later], {}) == []


def test_arrivals_lengths_ways_and_step_times_are_taken_out_of_a_recorded_run() -> None:
    recording = recorded(300)
    rows = trace_rows(recording).splitlines()
    assert rows[0] == "TIMESTAMP,ContextTokens,GeneratedTokens"
    assert len(rows) == 301
    first = min(recording.outcomes, key=lambda each: each.arrival_ns)
    assert rows[1].endswith(f",{first.prompt_tokens},{sum(first.output_tokens)}")
    assert 90 < sum(fitted_on(recording, o.arrival_ns) for o in recording.outcomes) < 210
    way = transit([recording])
    assert way.there == pytest.approx(500.0)
    fitted = fits([recording])["w0"]
    assert fitted.sums == pytest.approx(1.0, abs=0.05)
    assert fitted.model.fixed == pytest.approx(TRUTH.fixed, rel=0.15)
    assert fitted.model.per_decode == pytest.approx(TRUTH.per_decode, rel=0.25)


def moment(at_ms: int, step: int, held: dict[str, tuple[float, int]]) -> StatusSnapshot:
    """A snapshot at the end of a step; ``held``: when each sequence came to the worker, ms, and its output tokens."""
    running = [
        SequenceStatus(f"{request}.0", SequenceState.RUNNING, 4, 4 + tokens, tokens, 99, 1, round(came_ms * MS))
        for request, (came_ms, tokens) in held.items()
    ]
    return plain_snapshot("w0", step=step, at_ns=at_ms * MS, running=running, step_duration_ns=0)


def test_the_way_into_a_batch_is_told_by_those_who_came_too_late_for_it() -> None:
    """Every 4 s a batch begins; of two sequences on their way to it the one that came 2.2 ms before is late."""
    snapshots, outcomes = [], []
    for number in range(INTO_MIN):
        at_ms, step, early, late, old = 4_000 * (number + 1), 10 * number, f"e{number}", f"l{number}", f"o{number}"
        came = {old: (at_ms - 90, 1), early: (at_ms - 3.2, 1), late: (at_ms - 2.2, 1)}
        snapshots += [
            moment(at_ms, step + 1, {old: came[old]}),
            moment(at_ms + 20, step + 2, {name: came[name] for name in (old, early)}),
            moment(at_ms + 40, step + 3, came),
        ]
        outcomes += [outcome(f"{name}.0", round((ms - 2) * MS), at_ms * MS, 4, 9) for name, (ms, _) in came.items()]
    recording = msgspec.structs.replace(recorded(1), snapshots=snapshots, outcomes=outcomes)
    assert transit([recording]).into == pytest.approx(3_000.0)


def test_a_first_token_that_was_seen_in_its_step_tells_the_way_back() -> None:
    ended = [outcome(f"r{n}.0", n * MS, 90 * MS, 4, 9) for n in range(0, 900, 30)]
    seen = [moment(n + 2, n, {f"r{n}": (n + 1, 1)}) for n in range(0, 900, 30)]
    way = transit([msgspec.structs.replace(recorded(1), snapshots=seen, outcomes=ended)])
    assert (way.there, way.back) == pytest.approx((500.0, 3_000.0))
    assert way.worker_mean == pytest.approx((500.0 + 3_000.0) / 2 - 2 * way.hop_mean)
