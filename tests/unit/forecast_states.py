"""Snapshots, and random engines and step costs, for the tests of forecasts."""

import random
from typing import Any

import msgspec
from millrace.contracts.kv import KvGroup, KvNeed, blocks_for
from millrace.contracts.status import EngineSnapshot, SequenceState, SequenceStatus, StatusSnapshot
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_cost import FS_PER_NS, CostCurve, StepCost

from tests.testbed.messages import plain_snapshot

MICROSECOND_FS = 1000 * FS_PER_NS
AT_NS = 1_700_000_000_000_000_000
STEP_NS = 1000
CONSTANT = StepCost(fixed=STEP_NS * FS_PER_NS)
PARAMETERS = EngineParameters(max_model_len=128, block_size=4, blocks_total=64, max_sequences=8, token_budget=32)


def snapshot(
    running: list[SequenceStatus] | None = None, waiting: list[SequenceStatus] | None = None, *, blocks: int = 64
) -> StatusSnapshot:
    running = running or []
    return plain_snapshot(
        "i",
        at_ns=AT_NS,
        running=running,
        waiting=waiting or [],
        blocks_free=blocks - sum(status.blocks for status in running),
        blocks_total=blocks,
        step_duration_ns=STEP_NS,
    )


def decoding(name: str, prompt: int, output: int, **changes: Any) -> SequenceStatus:
    """A running sequence that has computed all but its last token."""
    computed = prompt + output - 1
    status = SequenceStatus(name, SequenceState.RUNNING, prompt, computed, output, 100, -(-computed // 4), AT_NS, 20)
    return msgspec.structs.replace(status, **changes)


def waiting(name: str, prompt: int, **changes: Any) -> SequenceStatus:
    status = SequenceStatus(name, SequenceState.WAITING, prompt, 0, 0, 100, 0, AT_NS, 20)
    return msgspec.structs.replace(status, **changes)


def published(state: EngineSnapshot) -> StatusSnapshot:
    both = set(state.__struct_fields__) & set(StatusSnapshot.__struct_fields__)
    fields = {name: getattr(state, name) for name in both}
    return StatusSnapshot(instance="i", incarnation=1, model="m", **fields)


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
        prefix_caching=False,
        watermark=rng.choice((0.0, 0.0, 0.01, 0.2)),
        reserve_full_prompt=rng.random() < 0.7,
    )


def grouped(parameters: EngineParameters, rng: random.Random) -> EngineParameters:
    """The same engine of a model whose layers also keep a state, and attention in blocks of another size."""
    size = parameters.block_size
    groups = [
        KvGroup(need=KvNeed.STATE, block_tokens=parameters.max_model_len, block_bytes=1),
        KvGroup(need=KvNeed.ALL, block_tokens=size, block_bytes=1),
        KvGroup(need=KvNeed.ALL, block_tokens=2 * size, block_bytes=1),
    ]
    rng.shuffle(groups)
    more = blocks_for(parameters.max_model_len, size, groups) - blocks_for(parameters.max_model_len, size)
    total = parameters.blocks_total + more
    return msgspec.structs.replace(parameters, groups=tuple(groups), blocks_total=total)


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
