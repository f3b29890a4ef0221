"""Random engines, snapshots and placements for the tests of forecasts; every one of them valid."""

from __future__ import annotations

import random

import msgspec
from millrace.contracts.status import SequenceState, SequenceStatus, StatusSnapshot
from millrace.enginemodel.forecast import Candidate, Placement
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_cost import FS_PER_NS, CostCurve, StepCost

from tests.testbed.messages import plain_snapshot

AT_NS = 1_700_000_000_000_000_000
MICROSECOND_FS = 1000 * FS_PER_NS


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one forecast depends on."""

    snapshot: StatusSnapshot
    candidate: Candidate
    cost: StepCost
    parameters: EngineParameters
    now_ns: int
    pending: list[Placement]
    cached: dict[str, int] = {}


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    parameters = random_parameters(rng)
    snapshot = random_snapshot(rng, parameters)
    return Case(
        snapshot=snapshot,
        cached=random_cached(rng, snapshot),
        candidate=random_candidate(rng, parameters),
        cost=random_cost(rng),
        parameters=parameters,
        now_ns=random_moment(rng),
        pending=[
            Placement(random_candidate(rng, parameters), random_moment(rng)) for _ in range(rng.choice((0, 0, 1, 3)))
        ],
    )


def random_moment(rng: random.Random) -> int:
    return AT_NS + rng.choice((-5, 0, 0, 1, rng.randrange(10**6), rng.randrange(10**8), rng.randrange(10**10)))


def random_parameters(rng: random.Random) -> EngineParameters:
    block_size = rng.choice((1, 4, 16, 32))
    max_model_len = rng.choice((40, 200, 700))
    chunked = rng.random() < 0.7
    least = -(-max_model_len // block_size)
    return EngineParameters(
        max_model_len=max_model_len,
        block_size=block_size,
        blocks_total=least + rng.choice((0, 1, 5, least, 10 * least)),
        max_sequences=rng.choice((1, 3, 8, 32)),
        token_budget=rng.choice((3, 17, 64, 512)) if chunked else max_model_len + rng.choice((0, 100)),
        long_prefill_token_threshold=rng.choice((0, 0, 5, 50)),
        chunked_prefill=chunked,
        prefix_caching=rng.random() < 0.5,
        watermark=rng.choice((0.0, 0.0, 0.01, 0.2)),
        reserve_full_prompt=rng.random() < 0.7,
        async_scheduling=rng.random() < 0.3,
    )


def random_snapshot(rng: random.Random, parameters: EngineParameters) -> StatusSnapshot:
    """Running sequences hold what they have computed, now and then one block more; some came with their KV and wait."""
    running: list[SequenceStatus] = []
    held = 0
    for index in range(rng.randrange(min(parameters.max_sequences, 12) + 1)):
        status = random_running(rng, parameters, index)
        if held + status.blocks > parameters.blocks_total:
            break
        held += status.blocks
        running.append(status)
    waiting = [random_waiting(rng, parameters, index) for index in range(rng.choice((0, 0, 1, 4, 10)))]
    for index in range(rng.choice((0, 0, 0, 1, 1, 3))):
        status = random_arrived(rng, parameters, index)
        if held + status.blocks <= parameters.blocks_total:
            held += status.blocks
            waiting.insert(rng.choice((index, rng.randrange(len(waiting) + 1))), status)
    return plain_snapshot(
        "i",
        at_ns=AT_NS,
        running=running,
        waiting=waiting,
        blocks_free=parameters.blocks_total - held,
        blocks_total=parameters.blocks_total,
        token_budget=rng.choice((0, 0, 0, 2, 16, 63, 600)),
    )


def random_running(rng: random.Random, parameters: EngineParameters, index: int) -> SequenceStatus:
    prompt, output, limit = random_lengths(rng, parameters)
    total = prompt + output
    computed = rng.choice((total - 1, total - 1, total, rng.randrange(total)))
    blocks = -(-computed // parameters.block_size) + rng.choice((0, 0, 0, 1))
    return SequenceStatus(
        f"running{index}.0",
        SequenceState.RUNNING,
        prompt,
        computed,
        output,
        limit,
        blocks,
        AT_NS - 1,
        random_expectation(rng),
    )


def random_waiting(rng: random.Random, parameters: EngineParameters, index: int) -> SequenceStatus:
    prompt, output, limit = random_lengths(rng, parameters)
    state = SequenceState.PREEMPTED if output else SequenceState.WAITING
    return SequenceStatus(f"waiting{index}.0", state, prompt, 0, output, limit, 0, AT_NS - 1, random_expectation(rng))


def random_arrived(rng: random.Random, parameters: EngineParameters, index: int) -> SequenceStatus:
    """One that came with its KV, or most of it; now and then without room for all its tokens, which no engine keeps."""
    prompt, output, limit = random_lengths(rng, parameters)
    total = prompt + output
    computed = rng.choice((total - 1, total - 1, total, rng.randrange(total)))
    blocks = -(-total // parameters.block_size) + rng.choice((0, 0, 0, 1, -1))
    expected = random_expectation(rng)
    return SequenceStatus(
        f"arrived{index}.0", SequenceState.WAITING, prompt, computed, output, limit, blocks, AT_NS - 1, expected
    )


def random_lengths(rng: random.Random, parameters: EngineParameters) -> tuple[int, int, int]:
    """Prompt, output so far, bound of the output; in one of ten the output is at a bound."""
    prompt = rng.randrange(1, parameters.max_model_len)
    output = rng.choice((0, rng.randrange(parameters.max_model_len - prompt + 1)))
    limit = rng.choice((output + 1, output + 20, 10_000))
    return prompt, output, output if output and rng.random() < 0.1 else limit


def random_expectation(rng: random.Random) -> int | None:
    return rng.choice((None, 1, rng.randrange(1, 30), rng.randrange(1, 500)))


def random_candidate(rng: random.Random, parameters: EngineParameters) -> Candidate:
    prompt = rng.randrange(1, parameters.max_model_len)
    output = rng.choice((0, 0, rng.randrange(parameters.max_model_len - prompt)))
    return Candidate(
        prompt_tokens=prompt,
        output_tokens=output,
        expected_output_tokens=random_expectation(rng),
        max_tokens=rng.choice((0, output + 1, output + 50)),
        sequences=rng.choice((1, 1, 1, 3)),
        cached_tokens=random_hit(rng, prompt + output, parameters),
    )


def random_hit(rng: random.Random, tokens: int, parameters: EngineParameters) -> int:
    """Whole blocks; mostly none, and never all tokens."""
    blocks = (tokens - 1) // parameters.block_size
    return rng.choice((0, 0, blocks, rng.randrange(blocks + 1))) * parameters.block_size


def random_cached(rng: random.Random, snapshot: StatusSnapshot) -> dict[str, int]:
    """Of some waiting sequences; now and then more than there is, and of sequences that are not there."""
    hits = {status.sequence: rng.choice((0, 3, 16, 64, 1000)) for status in snapshot.waiting if rng.random() < 0.5}
    return hits | ({"gone.0": 16} if rng.random() < 0.1 else {})


def random_cost(rng: random.Random) -> StepCost:
    """Of any form: bare, linear, with unequal lengths, with prompts beside decodes, with tables, or next to nothing."""

    def coefficient(most: int) -> int:
        return rng.choice((0, 0, rng.randrange(most)))

    def curve(most: int) -> CostCurve:
        starts = (0, *sorted(rng.sample(range(1, most), rng.randrange(4))))
        values = tuple(rng.randrange(50 * MICROSECOND_FS) for _ in starts)
        slopes = tuple(rng.randrange(-2000, 50_000_000) for _ in starts)
        return CostCurve(starts, values, slopes)

    tables = rng.random() < 0.4
    return StepCost(
        fixed=rng.choice((0, rng.randrange(5000 * MICROSECOND_FS))),
        decode=coefficient(50 * MICROSECOND_FS),
        prefill_token=coefficient(50 * MICROSECOND_FS),
        context_token=coefficient(MICROSECOND_FS),
        tail_token=coefficient(10 * MICROSECOND_FS),
        tail_decodes=rng.choice((0, 2, 5)),
        prefill_half_work=coefficient(MICROSECOND_FS),
        tokens=curve(64) if tables and rng.random() < 0.7 else None,
        sequences=curve(16) if tables and rng.random() < 0.7 else None,
        decode_context=tuple(curve(2000) for _ in range(rng.randrange(5))) if tables else (),
        prefill_work=tuple(curve(100_000) for _ in range(rng.randrange(5))) if tables else (),
        mixed_context=tuple(curve(2000) for _ in range(rng.randrange(4))) if tables else (),
        prefill_granularity=rng.choice((1, 16, 64)),
        mixed_decode=coefficient(50 * MICROSECOND_FS),
        mixed_context_token=coefficient(MICROSECOND_FS),
        mixed_work=coefficient(MICROSECOND_FS // 10),
    )
