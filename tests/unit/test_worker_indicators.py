"""Indicators of an instance's load: queues by phase, what is left to compute, and totals over an engine's steps."""

import msgspec
from millrace.actor.engine import EngineSequence
from millrace.contracts.kv import KvGroup, KvNeed
from millrace.contracts.status import EngineSnapshot, EngineTotals, PhaseQueues, SequenceState, SequenceStatus
from millrace.contracts.worker import Sampling
from millrace.enginemodel.engine import ModelledEngine
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_time_models import LinearStepTime
from millrace.enginemodel.tokens import OutputLengths

from services.worker.indicators import blocks_to_come, load_indicators
from tests.testbed.messages import plain

TOTALS = EngineTotals(7, 70, 5, 300, 900)


def entry(
    state: SequenceState, *, computed: int, output: int, expected: int | None = None, at_ns: int = 50
) -> SequenceStatus:
    return SequenceStatus("s", state, 100, computed, output, 400, 4, at_ns, expected)


def snapshot(running: list[SequenceStatus], waiting: list[SequenceStatus]) -> EngineSnapshot:
    return plain(EngineSnapshot, at_ns=60, running=running, waiting=waiting, totals=TOTALS)


def test_sequences_are_counted_by_phase_and_queue() -> None:
    told = load_indicators(
        snapshot(
            [
                entry(SequenceState.RUNNING, computed=40, output=0),
                entry(SequenceState.RUNNING, computed=119, output=20),
            ],
            [
                entry(SequenceState.WAITING, computed=0, output=0, at_ns=30),
                entry(SequenceState.PREEMPTED, computed=0, output=5),
                entry(SequenceState.PREEMPTED, computed=0, output=0, at_ns=45),
            ],
        ),
        (),
        now_ns=100,
        block_size=32,
        moves=(2, 1),
    )
    assert told.prefill == PhaseQueues(running=1, waiting=1, preempted=1, moving=2)
    assert told.decode == PhaseQueues(running=1, waiting=0, preempted=1, moving=1)
    assert told.prefill_tokens_left == 60 + 100 + 105 + 100
    assert told.longest_wait_ns == 70
    assert told.totals == TOTALS


def test_an_idle_instance_has_nothing_left_and_waits_for_nobody() -> None:
    told = load_indicators(snapshot([], []), (), now_ns=100, block_size=32, moves=(0, 0))
    assert (told.prefill_tokens_left, told.longest_wait_ns, told.blocks_growing) == (0, 0, 0)


def test_growth_follows_the_expected_length_within_the_bound_of_the_request() -> None:
    grown = entry(SequenceState.RUNNING, computed=119, output=20, expected=156)
    assert blocks_to_come(grown, 32) == 4
    assert blocks_to_come(entry(SequenceState.RUNNING, computed=119, output=20, expected=10_000), 32) == 12
    assert blocks_to_come(entry(SequenceState.RUNNING, computed=119, output=20), 32) == 0
    window = KvGroup(need=KvNeed.WINDOW, block_tokens=32, block_bytes=1, window=64)
    groups = [window, KvGroup(need=KvNeed.STATE, block_tokens=2048, block_bytes=1)]
    assert blocks_to_come(grown, 32, groups) == 0, "neither a full window grows nor a state"
    assert blocks_to_come(grown, 32, [*groups, msgspec.structs.replace(window, need=KvNeed.ALL)]) == 8
    assert blocks_to_come(entry(SequenceState.RUNNING, computed=119, output=20, expected=1), 32) == 0


def test_totals_are_the_sums_over_all_steps() -> None:
    engine = ModelledEngine(
        EngineParameters(
            max_model_len=4096, block_size=16, blocks_total=500, max_sequences=8, token_budget=64, prefix_caching=False
        ),
        LinearStepTime(fixed=1e6, per_decode=1e5, per_prefill_token=1e4, per_context_token=10.0),
        lengths=OutputLengths(mean=60, sigma=0.0, length_max=60),
    )
    for name in ("a", "b"):
        sampling = Sampling(max_tokens=50, ignore_eos=True)
        engine.add(EngineSequence(sequence=name, prompt_token_ids=[7] * 100, sampling=sampling, arrival_ns=0))
    now_ns, busy_ns, sums = 0, 0, [0, 0, 0]
    while (done := engine.step(now_ns)) is not None:
        stepped, duration_ns = done
        now_ns, busy_ns = stepped.at_ns, busy_ns + duration_ns
        batch = stepped.snapshot.batch
        sums = [sums[0] + batch.decodes, sums[1] + batch.prefill_tokens, sums[2] + batch.context_tokens]
    last = engine.snapshot(now_ns)
    assert last.totals == EngineTotals(last.step, busy_ns, *sums)
    assert last.totals.prefill_tokens == 200
