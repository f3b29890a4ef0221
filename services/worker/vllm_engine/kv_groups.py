"""KV cache groups of an engine: what of each a sequence needs, and the rows in which their blocks travel.

vLLM keeps the state of layers in groups, each with a block table of its own; all take their blocks from one pool. A
*row* names the blocks of one position of a sequence in every group, column by column: as many of a group as it has
blocks in a position's tokens. ``NO_BLOCK`` stands where a position needs none of a group.

    need    a row names of it                                          example
    all     every block                                                full attention, MLA
    window  blocks that the source still holds: those of the last      sliding window, chunked local attention
            window, and of earlier ones since the lease began
    state   nothing; but the row of a frozen sequence's last token,    Mamba, GDN, short convolution
            or the one after it where that row is full, has the state

A state is that of exactly one number of tokens: without it, or at any other length, such a sequence is recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from millrace.contracts.kv import NO_BLOCK, KvGroup, KvNeed
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    iter_layer_specs,
)

#: By the exact class: a subclass may keep its blocks in another way.
_NEEDS = {
    FullAttentionSpec: KvNeed.ALL,
    MLAAttentionSpec: KvNeed.ALL,
    SlidingWindowSpec: KvNeed.WINDOW,
    ChunkedLocalAttentionSpec: KvNeed.WINDOW,
    MambaSpec: KvNeed.STATE,
}


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One group.

    Attributes:
        manager: VLLM's, with the block tables.
        block_tokens: Of one of its blocks.
        columns: Blocks of it in a row.
    """

    manager: Any
    need: KvNeed
    block_tokens: int
    columns: int

    def first_needed(self, tokens: int) -> int:
        """Index of the first block that a sequence of so many tokens goes on with."""
        return max(0, int(self.manager.get_num_skipped_tokens(tokens))) // self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a sequence of so many tokens holds, and one more where its window moves on."""
        whole = -(-tokens // self.block_tokens)
        return whole - max(0, self.first_needed(tokens) - (self.need is KvNeed.WINDOW))

    def fresh(self, tokens: int, total: int) -> range:
        """Indices of the blocks that so many tokens lack to be ``total``; none of a state."""
        size = self.block_tokens
        return range(0) if self.need is KvNeed.STATE else range(-(-tokens // size), -(-total // size))

    def held(self, request_id: str, computed_tokens: int) -> int:
        """Blocks in a request's table, those that its window has left apart."""
        table = self.manager.req_to_blocks.get(request_id, ())
        return max(0, len(table) - self.first_needed(computed_tokens))


class CacheGroups:
    """All groups of an engine.

    Attributes:
        block_tokens: Of a position: a whole number of blocks of each group that grows with the tokens.
    """

    def __init__(self, kv_cache_manager: Any) -> None:
        managers = kv_cache_manager.coordinator.single_type_managers
        needs = [need_of(manager.kv_cache_spec) for manager in managers]
        grows = [manager.block_size for manager, need in zip(managers, needs, strict=True) if need is not KvNeed.STATE]
        self.block_tokens = math.lcm(*grows) if grows else managers[0].block_size
        self.all = [
            CacheGroup(
                manager, need, size := manager.block_size, 1 if need is KvNeed.STATE else self.block_tokens // size
            )
            for manager, need in zip(managers, needs, strict=True)
        ]
        self.width = sum(group.columns for group in self.all)
        self.has_state = KvNeed.STATE in needs

    def rows(self, request_id: str, first: int, tokens: int, *, tail: bool) -> list[list[int]]:
        """Rows of a request from a position on: of its full ones, or with ``tail`` all that ``needed`` counts."""
        last = self.needed(tokens) if tail else tokens // self.block_tokens
        return [self._row(request_id, position, tokens, state=tail) for position in range(max(0, first), last)]

    def _row(self, request_id: str, position: int, tokens: int, *, state: bool) -> list[int]:
        row: list[int] = []
        for group in self.all:
            table = group.manager.req_to_blocks.get(request_id, ())
            if group.need is KvNeed.STATE:
                here = state and position == tokens // self.block_tokens
                row.append(table[(tokens - 1) // group.block_tokens].block_id if here else NO_BLOCK)
                continue
            blocks = table[position * group.columns : (position + 1) * group.columns]
            row += [block.block_id for block in blocks] + [NO_BLOCK] * (group.columns - len(blocks))
        return row

    def leaving(self, rows: list[list[int]]) -> list[int]:
        """Block ids in rows that a running request may give back before its end."""
        kept = [group.need is KvNeed.WINDOW for group in self.all for _ in range(group.columns)]
        return [block for row in rows for block, leaves in zip(row, kept, strict=True) if leaves and block != NO_BLOCK]

    def needed(self, tokens: int) -> int:
        """Rows that a sequence of so many computed tokens is handed over in."""
        return tokens // self.block_tokens + 1 if self.has_state else -(-tokens // self.block_tokens)

    def blocks_for(self, tokens: int) -> int:
        """As CacheGroup's, of all groups."""
        return sum(group.blocks_for(tokens) for group in self.all)


class ReservedBlocks:
    """Blocks of a reservation, group by group; each holds one reference."""

    def __init__(self, groups: CacheGroups, pool: Any, new_blocks: Any) -> None:
        """Args: new_blocks: takes a number of blocks from the pool, that are to follow others in a table."""
        self._groups, self._pool, self._new = groups, pool, new_blocks
        self._tables: list[list[KVCacheBlock]] = [[] for _ in groups.all]
        self._spare: list[list[KVCacheBlock]] = [[] for _ in groups.all]

    def __len__(self) -> int:
        return len(self._held())

    def _held(self) -> list[KVCacheBlock]:
        tables = (block for table in self._tables for block in table if not block.is_null)
        return [*tables, *(block for spare in self._spare for block in spare)]

    def match(self, found: Any, positions: int) -> None:
        """Begins with what the prefix cache has of so many positions. A state is worth nothing: another one comes."""
        for group, table, hits in zip(self._groups.all, self._tables, found, strict=True):
            if group.need is not KvNeed.STATE:
                table += hits[: positions * group.columns]
                self._pool.touch([block for block in table if not block.is_null])

    def lacks(self, tokens: int) -> list[int]:
        """Blocks that each group lacks to hold a sequence of so many tokens."""
        return [
            group.blocks_for(tokens) - sum(not block.is_null for block in table) - len(spare)
            for group, table, spare in zip(self._groups.all, self._tables, self._spare, strict=True)
        ]

    def take(self, counts: list[int]) -> None:
        """Takes so many free blocks more for each group."""
        for table, spare, count in zip(self._tables, self._spare, counts, strict=True):
            spare += self._new(self._pool, max(0, count), after=[*table[-1:], *spare])

    def lacks_for(self, first: int, rows: list[list[int]]) -> int:
        """Free blocks that ``place`` would take."""
        return self._lacking((index, at) for index, at, block in self._places(first, rows) if block != NO_BLOCK)

    def _lacking(self, wanted: Iterable[tuple[int, int]]) -> int:
        """Free blocks that it takes to have one at each (group's index, index in its table)."""
        lacking = [-len(spare) for spare in self._spare]
        for index, at in wanted:
            table = self._tables[index]
            lacking[index] += at >= len(table) or table[at].is_null
        return sum(max(0, count) for count in lacking)

    def place(self, first: int, rows: list[list[int]]) -> list[list[int]]:
        """Rows of own blocks for the source's rows, from a position on."""
        placed = []
        for index, at, block in self._places(first, rows):
            placed.append(NO_BLOCK if block == NO_BLOCK else self._block(index, at).block_id)
        width = self._groups.width
        return [placed[start : start + width] for start in range(0, len(placed), width)]

    def _places(self, first: int, rows: list[list[int]]) -> Any:
        """(group's index, index in its table, the source's block) of each column of each row."""
        for position, row in enumerate(rows, first):
            columns = iter(row)
            for index, group in enumerate(self._groups.all):
                for column in range(group.columns):
                    at = 0 if group.need is KvNeed.STATE else position * group.columns + column
                    yield index, at, next(columns)

    def _block(self, index: int, at: int) -> KVCacheBlock:
        table = self._tables[index]
        table += [self._pool.null_block] * (at + 1 - len(table))
        if table[at].is_null:
            spare = self._spare[index] or self._new(self._pool, 1, after=table[at - 1 : at])
            table[at] = spare.pop(0)
        return table[at]

    def reach(self, tokens: int, good: int) -> int:
        """Most tokens, at most ``tokens``, that a sequence can go on from, where its first ``good`` positions are read.

        All of them, or a whole number of positions: where a window has left that point, or there is a state, fewer or
        none.
        """
        if good >= self._groups.needed(tokens) and self._complete(tokens, state=True):
            return tokens
        for position in range(min(good, tokens // self._groups.block_tokens), 0, -1):
            if self._complete(position * self._groups.block_tokens, state=False):
                return position * self._groups.block_tokens
        return 0

    def _complete(self, tokens: int, *, state: bool) -> bool:
        for group, table in zip(self._groups.all, self._tables, strict=True):
            if group.need is KvNeed.STATE:
                if not state or not table:
                    return False
                continue
            needed = table[group.first_needed(tokens) : -(-tokens // group.block_tokens)]
            whole = -(-tokens // group.block_tokens) - group.first_needed(tokens)
            if len(needed) < whole or any(block.is_null for block in needed):
                return False
        return True

    def lacks_to_settle(self, tokens: int, total: int) -> int:
        """Free blocks that ``settle`` would take."""
        groups = enumerate(self._groups.all)
        return self._lacking((index, at) for index, group in groups for at in group.fresh(tokens, total))

    def settle(self, tokens: int, total: int) -> list[list[KVCacheBlock]]:
        """Tables of a request that has computed ``tokens`` of ``total``; what it does not need is freed."""
        tables = [self._settled(index, group, tokens, total) for index, group in enumerate(self._groups.all)]
        self.free()
        return tables

    def _settled(self, index: int, group: CacheGroup, tokens: int, total: int) -> list[KVCacheBlock]:
        table, null = self._tables[index], self._pool.null_block
        computed = -(-tokens // group.block_tokens)
        if group.need is KvNeed.STATE:
            self._tables[index] = []
            return [null] * (computed - 1) + table
        fresh = [self._block(index, at) for at in group.fresh(tokens, total)]
        if group.manager.records_new_block_ids:  # read before it is written, in some kernels
            group.manager.new_block_ids.extend(block.block_id for block in fresh)
        first = group.first_needed(tokens)
        self._tables[index] = table[:first] + table[computed + len(fresh) :]
        return [null] * first + table[first : computed + len(fresh)]

    def free(self) -> None:
        self._pool.free_blocks(reversed(self._held()))
        for blocks in (*self._tables, *self._spare):
            blocks.clear()


def need_of(spec: Any) -> KvNeed:
    """Return the need of a group. Raises KeyError: its kind is not known."""
    (need,) = {_NEEDS[type(each)] for each in iter_layer_specs(spec)}
    return need


def unknown_groups(kv_cache_config: Any) -> str:
    """Names of what some groups keep and nothing here knows how to move; empty for none."""
    kinds = {type(spec) for spec in _specs(kv_cache_config)}
    return ", ".join(sorted(kind.__name__ for kind in kinds - _NEEDS.keys()))


def has_state(kv_cache_config: Any) -> bool:
    """Whether some layers keep one."""
    return any(isinstance(spec, MambaSpec) for spec in _specs(kv_cache_config))


def _specs(kv_cache_config: Any) -> list[Any]:
    return [spec for group in kv_cache_config.kv_cache_groups for spec in iter_layer_specs(group.kv_cache_spec)]


def layer_spec(group: Any, layer: str) -> Any:
    """The spec of one layer of a group."""
    spec = group.kv_cache_spec
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def group_bytes(group: Any) -> int:
    """Bytes of one block of a group, on one rank."""
    return sum(int(layer_spec(group, layer).page_size_bytes) for layer in group.layer_names)


def described(kv_cache_config: Any, ranks: int) -> list[KvGroup]:
    """The groups as others are told."""
    return [
        KvGroup(
            need=need_of(group.kv_cache_spec),
            block_tokens=group.kv_cache_spec.block_size,
            block_bytes=group_bytes(group) * ranks,
            window=_window(group.kv_cache_spec),
        )
        for group in kv_cache_config.kv_cache_groups
    ]


def _window(spec: Any) -> int:
    first = next(iter(iter_layer_specs(spec)))
    match first:
        case SlidingWindowSpec():
            return int(first.sliding_window)
        case ChunkedLocalAttentionSpec():
            return int(first.attention_chunk_size)
        case _:
            return 0
