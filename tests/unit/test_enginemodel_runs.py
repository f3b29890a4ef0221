"""Runs of decode steps computed at once: the same steps, times, blocks and tokens as one by one."""

from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any

import pytest
from millrace.actor.engine import EngineEvent, EngineSequence, EngineStepped
from millrace.contracts.status import BatchComposition
from millrace.contracts.worker import Sampling
from millrace.enginemodel.engine import ModelledEngine
from millrace.enginemodel.pacing import PacedEngine
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.runs import DecodeRun
from millrace.enginemodel.scripted import ScriptedEngine
from millrace.enginemodel.step_cost import CostCurve, StepCost
from millrace.enginemodel.step_time_models import LinearStepTime
from millrace.enginemodel.tokens import OutputLengths

MILLISECOND = 1_000_000


class Queue:
    """A clock that jumps from event to event; what was asked for first comes first at equal times."""

    def __init__(self) -> None:
        self.time_ns = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def now_ns(self) -> int:
        return self.time_ns

    def at(self, time_ns: int, callback: Callable[[], None]) -> None:
        self._count += 1
        heappush(self._heap, (max(time_ns, self.time_ns), self._count, callback))

    def run(self) -> None:
        while self._heap:
            self.time_ns, _count, callback = heappop(self._heap)
            callback()


def state(engine: ModelledEngine) -> dict[str, Any]:
    scheduler = engine.scheduler
    last = engine.snapshot(0)
    running: list[Any] = list(scheduler.running)
    return {
        "running": [(s.sequence, s.total, s.computed, s.blocks, s.slots, s.named_blocks) for s in running],
        "tokens": [list(s.token_ids) for s in running],
        "waiting": [(s.sequence, s.total, s.preemptions) for s in scheduler.waiting],
        "free": scheduler.pool.free_order(),
        "preemptions": scheduler.preemptions,
        "last": (last.batch, last.step_duration_ns),
    }


class Rig:
    """An engine that runs through a plan of additions and cancellations; keeps what it said and how it stood."""

    def __init__(self, engine: ModelledEngine, plan: list[tuple[int, Any]], **options: Any) -> None:
        self.queue = Queue()
        self.engine = engine
        self.states: dict[int, tuple[int, dict[str, Any]]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.first_ns: dict[str, int] = {}
        self.ended: dict[str, tuple[int, str]] = {}
        self.messages = 0
        paced = PacedEngine(engine, self.queue, self._hear, **options)
        for at_ns, what in plan:
            if isinstance(what, EngineSequence):
                self.queue.at(at_ns, lambda sequence=what: paced.add(sequence))
            elif isinstance(what, int):
                self.queue.at(at_ns, lambda duration_ns=what: paced.stall(duration_ns))
            else:
                self.queue.at(at_ns, lambda name=what: paced.cancel([name]))
        self.queue.run()

    def _hear(self, event: EngineEvent) -> None:
        if not isinstance(event, EngineStepped):
            return
        self.messages += 1
        self.states[event.step] = (event.at_ns, state(self.engine))
        self.engine.check_invariants()
        for output in event.outputs:
            self.tokens.setdefault(output.sequence, []).extend(output.token_ids)
            self.first_ns.setdefault(output.sequence, event.at_ns)
            if output.finish is not None:
                self.ended[output.sequence] = (event.at_ns, output.finish.value)


def draw(rng: Random) -> tuple[EngineParameters, LinearStepTime, list[tuple[int, Any]]]:
    """Parameters, step times and a plan: from idle engines to full queues and preemptions."""
    block_size = rng.choice((4, 16))
    parameters = EngineParameters(
        max_model_len=160,
        block_size=block_size,
        blocks_total=rng.choice((160, 240, 800)) // block_size,
        max_sequences=rng.choice((2, 5, 40)),
        token_budget=rng.choice((8, 40, 256)),
        long_prefill_token_threshold=rng.choice((0, 16)),
        prefix_caching=rng.random() < 0.5,
        watermark=rng.choice((0.0, 0.05)),
        reserve_full_prompt=rng.random() < 0.5,
    )
    step_time = LinearStepTime(
        fixed=rng.uniform(1e6, 9e6),
        per_decode=rng.uniform(0, 3e5),
        per_prefill_token=rng.uniform(0, 3e4),
        per_context_token=rng.choice((0.0, 777.7)),
        per_tail_token=rng.choice((0.0, 0.0, 20_000.1)),
        tail_decodes=rng.choice((0, 3)),
        per_mixed_context_token=rng.choice((0.0, 333.3)),
        per_prompted_step=rng.choice((0.0, 1.25e6)),
    )
    gap_ns = rng.choice((2, 15, 120)) * MILLISECOND
    plan: list[tuple[int, Any]] = []
    at_ns = 0
    for number in range(rng.randrange(1, 40)):
        at_ns += int(rng.expovariate(1 / gap_ns))
        prompt = [rng.choice((7, 8))] * rng.randrange(1, 60)
        sampling = Sampling(
            max_tokens=rng.choice((1, 3, 40, 400)),
            stop_token_ids=[101] if rng.random() < 0.1 else [],
            logprobs=1 if rng.random() < 0.05 else None,
        )
        output = [9] * rng.randrange(sampling.max_tokens) if rng.random() < 0.1 else []
        sequence = EngineSequence(
            sequence=f"s{number}",
            prompt_token_ids=prompt,
            output_token_ids=output[:60],
            sampling=sampling,
            arrival_ns=at_ns,
        )
        plan.append((at_ns, sequence))
        if rng.random() < 0.15:
            plan.append((at_ns + int(rng.expovariate(1 / (200 * MILLISECOND))), f"s{rng.randrange(number + 1)}"))
        if rng.random() < 0.03:
            plan.append((at_ns, rng.randrange(50 * MILLISECOND)))
    return parameters, step_time, sorted(plan, key=lambda entry: entry[0])


@pytest.mark.parametrize("seed", range(40))
def test_runs_give_the_steps_times_blocks_and_tokens_of_single_steps(seed: int) -> None:
    parameters, step_time, plan = draw(Random(seed))
    lengths = OutputLengths(mean=30, sigma=0.9)
    single = Rig(ModelledEngine(parameters, step_time, lengths=lengths), plan)
    interval_ns = Random(seed).choice((0, 30, 500)) * MILLISECOND
    engine = ModelledEngine(parameters, step_time, lengths=lengths, tell_interval_ns=interval_ns)
    together = Rig(engine, plan, run_ns_max=1000 * MILLISECOND, snapshot_interval_ns=250 * MILLISECOND)

    assert together.engine.steps == single.engine.steps
    assert together.ended == single.ended
    assert together.first_ns == single.first_ns
    finished = set(single.ended)
    assert {n: t for n, t in together.tokens.items() if n in finished} == {
        n: t for n, t in single.tokens.items() if n in finished
    }
    assert together.states
    for step, (at_ns, stood) in together.states.items():
        assert (at_ns, stood) == single.states[step]


def test_the_step_under_way_is_the_one_that_has_not_ended() -> None:
    cost = StepCost(fixed=2 * 10**12 + 1, context_token=10**9)
    run = DecodeRun(cost, BatchComposition(decodes=3, context_tokens=100), begins_ns=5, remainder_fs=999_999)
    run.limit(400, 10**12)
    for number in (1, 2, 77, run.steps):
        assert run.under_way(run.ends_ns(number)) == number
        assert run.under_way(run.ends_ns(number) - 1) == number
    assert run.under_way(run.ends_ns(3) + 1) == 4


@pytest.mark.parametrize(
    "cost",
    [
        StepCost(fixed=10**12, decode=7, context_token=12_345_678),
        StepCost(fixed=10**12, context_token=10**8, tail_token=10**9),
        StepCost(fixed=10**12, tokens=CostCurve((0, 4), (5, 9), (1, 2)), sequences=CostCurve((0,), (3,), (4,))),
        StepCost(fixed=10**12, decode_context=(CostCurve((0, 900), (0, 10**9), (10**6, 10**7)),)),
        StepCost(fixed=3, context_token=0),
    ],
)
def test_a_runs_time_is_the_sum_of_its_steps(cost: StepCost) -> None:
    first = BatchComposition(decodes=5, context_tokens=800, longest_context=300)
    run = DecodeRun(cost, first, begins_ns=0, remainder_fs=17)
    for steps in (1, 2, 50):
        assert run.elapsed_fs(steps) == 17 + cost.decode_run_fs(first, steps)


def test_a_scripted_sequence_ends_where_its_script_or_its_bounds_say() -> None:
    lengths = {"a": 3, "b": 50, "c": 500}
    parameters = EngineParameters(max_model_len=100)
    engine = ScriptedEngine(parameters, LinearStepTime(fixed=1e6), output_length=lengths.__getitem__)
    plan = [
        (0, EngineSequence(sequence=name, prompt_token_ids=[5] * 10, sampling=Sampling(max_tokens=bound)))
        for name, bound in (("a", 90), ("b", 20), ("c", 400))
    ]
    rig = Rig(engine, list(plan))
    assert {name: (len(rig.tokens[name]), finish) for name, (_at, finish) in rig.ended.items()} == {
        "a": (3, "stop"),
        "b": (20, "length"),
        "c": (90, "length"),
    }
