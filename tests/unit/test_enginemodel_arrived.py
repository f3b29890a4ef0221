"""Sequences that came with their KV, in the modelled scheduler: admitted before all that wait, beside long prompts."""

from typing import Any

from millrace.contracts.status import SequenceState
from millrace.enginemodel.batch import Batch
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.scheduler import Scheduler
from millrace.enginemodel.sequence import ScheduledSequence

BLOCK = 4


def scheduler(**changes: Any) -> Scheduler:
    fields = {"max_model_len": 128, "block_size": BLOCK, "blocks_total": 64, "max_sequences": 8, "token_budget": 32}
    return Scheduler(EngineParameters(**{**fields, **changes}))


def new(name: str, tokens: int, *, prompt: int = 0) -> ScheduledSequence:
    ids = [ord(name[0])] * tokens
    return ScheduledSequence(name, ids, prompt_tokens=prompt or tokens, max_tokens=60)


def wait(engine: Scheduler, name: str, tokens: int) -> ScheduledSequence:
    engine.add(sequence := new(name, tokens))
    return sequence


def arrive(engine: Scheduler, name: str = "came", tokens: int = 10, *, computed: int = 0) -> ScheduledSequence:
    """One of whose tokens half are prompt; all but the last are computed where nothing is said."""
    sequence = new(name, tokens, prompt=tokens // 2)
    blocks = engine.pool.take(-(-tokens // BLOCK))
    engine.adopt(sequence, blocks, computed=computed or tokens - 1, named=0)
    return sequence


def step(engine: Scheduler) -> dict[str, int]:
    """Run one step; return the tokens it computed by sequence. All that are due have their token after it."""
    batch: Batch = engine.schedule()
    for sequence in batch.sampling:
        sequence.append(1)
    engine.check_invariants()
    return {sequence.sequence: count for sequence, count in zip(batch.sequences, batch.counts, strict=True)}


def test_prompts_share_what_decoding_ones_and_those_that_came_leave() -> None:
    engine = scheduler(long_prefill_token_threshold=20)
    for name, tokens in (("decodes", 8), ("prompt", 60), ("other", 60)):
        wait(engine, name, tokens)
    assert step(engine) == {"decodes": 8, "prompt": 20, "other": 4}
    arrive(engine)
    assert step(engine) == {"decodes": 1, "prompt": 15, "other": 15, "came": 1}


def test_what_did_not_come_whole_is_computed_like_a_prompt_of_the_same_chunk() -> None:
    engine = scheduler()
    wait(engine, "prompt", 100)
    step(engine)
    arrive(engine, tokens=40, computed=8)
    assert step(engine) == {"prompt": 31, "came": 1}
    assert step(engine) == {"prompt": 32}
    assert step(engine) == {"prompt": 5, "came": 27}


def test_more_decodes_than_budget_leave_a_prompt_one_token() -> None:
    engine = scheduler(token_budget=4)
    for name in ("one", "two"):
        wait(engine, name, 2)
    assert step(engine) == {"one": 2, "two": 2}
    wait(engine, "prompt", 10)
    assert step(engine) == {"one": 1, "two": 1, "prompt": 2}
    for name in ("came", "too", "also"):
        arrive(engine, name)
    assert step(engine) == {"one": 1, "two": 1, "prompt": 1, "came": 1}


def test_who_came_and_waits_for_the_watermark_holds_up_those_behind() -> None:
    engine = scheduler(watermark=0.1, blocks_total=40)
    wait(engine, "runs", 6)
    step(engine)
    arrive(engine)
    wait(engine, "waits", 1)
    engine.aside["m"] = engine.pool.take(engine.pool.free - 3)
    assert step(engine) == {"runs": 1}
    engine.pool.release(engine.aside.pop("m"))
    assert step(engine) == {"runs": 1, "came": 1, "waits": 1}


def test_a_step_that_preempts_admits_nobody_and_takes_no_block_of_who_came() -> None:
    engine = scheduler(blocks_total=32)
    for name in ("first", "second"):
        wait(engine, name, BLOCK)
    step(engine)
    came = arrive(engine, tokens=100)
    engine.aside["m"] = engine.pool.take(engine.pool.free)
    assert step(engine) == {"first": 1}
    assert (len(came.blocks), engine.preemptions) == (25, 1)
    assert step(engine) == {"first": 1, "came": 1}


def test_where_the_only_one_that_runs_makes_room_for_nobody_the_next_step_has_who_came() -> None:
    engine = scheduler(blocks_total=32)
    runs = wait(engine, "runs", BLOCK)
    step(engine)
    arrive(engine, tokens=100)
    engine.aside["m"] = engine.pool.take(engine.pool.free)
    assert step(engine) == {"came": 1}
    assert runs.state is SequenceState.PREEMPTED
