"""Rows of a sequence and the tables that a target makes of them, over vLLM's own block tables, without an engine."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from millrace.contracts.kv import NO_BLOCK

pytest.importorskip("vllm")
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.request import Request

from services.worker.vllm_engine.kv_groups import CacheGroups, ReservedBlocks
from services.worker.vllm_engine.kv_mover import MovingMixin
from services.worker.vllm_engine.segment_queue import new_blocks

BLOCK, WINDOW, BLOCKS = 16, 40, 200
_SHAPE: dict[str, Any] = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
SPECS: dict[str, Any] = {
    "full": FullAttentionSpec(block_size=BLOCK, **_SHAPE),
    "window": SlidingWindowSpec(block_size=BLOCK, sliding_window=WINDOW, **_SHAPE),
    "small": SlidingWindowSpec(block_size=BLOCK // 2, sliding_window=WINDOW, **_SHAPE),
    "state": MambaSpec(block_size=1024, shapes=((4, 4),), dtypes=(torch.float32,)),
    "checkpoints": MambaSpec(block_size=BLOCK, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align"),
}
#: Groups of an engine, and whether its prefix cache is on.
ENGINES = [
    (("full",), True),
    (("full", "window"), True),
    (("full", "window", "small"), True),
    (("window",), False),
    (("full", "state"), False),
    (("full", "checkpoints"), True),
    (("state",), False),
]


class Side:
    """The block tables of one engine."""

    def __init__(self, names: tuple[str, ...], *, caching: bool) -> None:
        init_none_hash(sha256)
        specs = [SPECS[name] for name in names]
        groups = [KVCacheGroupSpec([f"layer.{index}"], spec) for index, spec in enumerate(specs)]
        sizes = [spec.block_size for spec in specs]
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=1024,
            scheduler_block_size=max(sizes),
            hash_block_size=min(sizes) if caching else max(sizes),
            enable_caching=caching,
        )
        self.groups = CacheGroups(self.manager)
        self.pool = self.manager.block_pool
        self.hasher = get_request_block_hasher(min(sizes), sha256) if caching else None

    def request(self, tokens: list[int], output: int = 0) -> Request:
        prompt = tokens[: len(tokens) - output]
        request = Request("r", prompt, SamplingParams(max_tokens=500), None, block_hasher=self.hasher)
        for token in tokens[len(prompt) :]:
            request.append_output_token_ids(token)
        return request

    def decode(self, request: Request, tokens: list[int]) -> None:
        """Computes what is known of a request, then these one by one."""
        if missing := request.num_tokens - request.num_computed_tokens:
            self._step(request, missing)
        for token in tokens:
            request.append_output_token_ids(token)
            self._step(request, 1)

    def _step(self, request: Request, count: int) -> None:
        self.manager.new_step_starts()
        assert self.manager.allocate_slots(request, count) is not None
        request.num_computed_tokens += count

    def null_pattern(self) -> list[list[bool]]:
        return [[block.is_null for block in group.manager.req_to_blocks["r"]] for group in self.groups.all]

    def free(self) -> int:
        return int(self.pool.get_num_free_blocks())

    def reserved(self) -> ReservedBlocks:
        return ReservedBlocks(self.groups, self.pool, new_blocks)


def adopt(side: Side, held: ReservedBlocks, request: Request, computed: int) -> None:
    for group, table in zip(side.groups.all, held.settle(computed, request.num_tokens), strict=True):
        group.manager.req_to_blocks["r"] = table
        group.manager.num_cached_block["r"] = 0
    side.manager.cache_blocks(request, computed)
    request.num_computed_tokens = computed


@pytest.mark.parametrize(("names", "caching"), ENGINES)
@pytest.mark.parametrize("length", [5, 15, 16, 17, 63, 64, 65, 200])
@pytest.mark.parametrize("before", [0, 30])
def test_a_moved_sequence_has_the_blocks_that_it_would_have_had(
    names: tuple[str, ...], caching: bool, length: int, before: int
) -> None:
    source, target = Side(names, caching=caching), Side(names, caching=caching)
    free = target.free()
    tokens = list(range(length))
    here = source.request(tokens)
    source.decode(here, [])
    held = target.reserved()
    held.take(held.lacks(length + before))
    early = source.groups.rows("r", 0, here.num_computed_tokens, tail=False)
    held.place(0, early)
    more = [1000 + index for index in range(before)]
    source.decode(here, more)
    computed = here.num_computed_tokens
    last = source.groups.rows("r", len(early), computed, tail=True)
    placed = held.place(len(early), last)
    assert [[block == NO_BLOCK for block in row] for row in placed] == [
        [block == NO_BLOCK for block in row] for row in last
    ]
    assert held.reach(computed, source.groups.needed(computed)) == computed
    there = target.request([*tokens, *more, 9], output=before + 1)
    adopt(target, held, there, computed)
    source.decode(here, [9, 10, 11])
    target.decode(there, [10, 11])
    assert target.null_pattern() == source.null_pattern()
    assert target.free() == source.free()
    target.manager.free(there)
    assert target.free() == free


def test_a_row_names_each_group_once_and_the_small_one_as_often_as_it_has_blocks() -> None:
    side = Side(("full", "window", "small"), caching=True)
    side.decode(side.request(list(range(100))), [])
    rows = side.groups.rows("r", 0, 100, tail=True)
    assert (side.groups.block_tokens, side.groups.width, len(rows)) == (BLOCK, 4, 7)
    ids = [block for row in rows for block in row if block != NO_BLOCK]
    assert len(ids) == len(set(ids))
    assert all(row[0] != NO_BLOCK for row in rows)


def test_a_state_travels_in_the_last_row_of_a_frozen_sequence_alone() -> None:
    side = Side(("full", "checkpoints"), caching=True)
    for length in (40, 48):
        request = side.request(list(range(length)))
        side.decode(request, [])
        assert [row[1] for row in side.groups.rows("r", 0, length, tail=False)] == [NO_BLOCK] * (length // BLOCK)
        *others, last = (row[1] for row in side.groups.rows("r", 0, length, tail=True))
        assert set(others) == {NO_BLOCK}
        assert last != NO_BLOCK
        side.manager.free(request)


@pytest.mark.parametrize("names", [("full", "window"), ("full", "state")])
def test_a_part_of_a_sequence_is_of_use_as_far_as_each_group_reaches(names: tuple[str, ...]) -> None:
    source, target = Side(names, caching=False), Side(names, caching=False)
    source.decode(source.request(list(range(194))), [7])
    held = target.reserved()
    held.place(0, source.groups.rows("r", 0, 195, tail=True))
    whole = source.groups.needed(195)
    assert held.reach(195, whole) == 195
    assert held.reach(195, whole - 1) == (0 if source.groups.has_state else 192)
    assert held.reach(195, 4) == 0, "its window begins later"
    held.free()
    assert target.free() == BLOCKS - 1


@pytest.mark.parametrize(("drafts", "chunk"), [(0, 2), (3, 4)])
def test_prompts_leave_one_that_arrives_its_token_and_what_it_may_draft(drafts: int, chunk: int) -> None:
    prompt = SimpleNamespace(num_tokens_with_spec=90, num_computed_tokens=0)
    engine: Any = SimpleNamespace(
        running=[prompt] * 3, kv_holding_waiting=[object()], max_num_scheduled_tokens=9, num_spec_tokens=drafts
    )
    assert MovingMixin._chunk_beside_arrivals(engine, 0) == chunk
