"""A sequence as the scheduler sees it: token counts, blocks, place in the order. Mutable, owned by one Scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.contracts.status import SequenceState
from millrace.kvcache.chain import ROOT, chain_hash, extend_chain


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """One sequence in a modelled engine.

    Attributes:
        token_ids: Prompt and output so far, of earlier epochs too: this object's own. The scheduler reads them only to
            name full blocks.
        total: ``len(token_ids)``.
        computed: Tokens whose KV is computed or being computed in the step under way.
        placeholders: Tokens sampled by a step whose outputs are not known yet (async scheduling).
        in_flight: Tokens in scheduled steps whose outputs are not processed yet.
        stale: Share of ``in_flight`` that was scheduled before a preemption.
        blocks: KV blocks held, in token order.
        slots: ``len(blocks) * block_size``.
        beside: Blocks held of other groups than the one that ``blocks`` is of, in no order.
        named_blocks: How many of ``blocks`` are in the prefix index.
        hashes: Chain hashes of full blocks; may lag behind ``token_ids`` until they are needed.
        hit_tokens: Tokens found in the prefix cache at the first admission; None before it.
    """

    sequence: str
    token_ids: list[int]
    prompt_tokens: int = field(kw_only=True)
    max_tokens: int = field(kw_only=True)
    arrival_ns: int = field(default=0, kw_only=True)
    total: int = field(init=False)
    computed: int = field(default=0, init=False)
    placeholders: int = field(default=0, init=False)
    in_flight: int = field(default=0, init=False)
    stale: int = field(default=0, init=False)
    blocks: list[int] = field(default_factory=list, init=False)
    beside: list[int] = field(default_factory=list, init=False)
    slots: int = field(default=0, init=False)
    named_blocks: int = field(default=0, init=False)
    hashes: list[int] = field(default_factory=list, init=False)
    hit_tokens: int | None = field(default=None, init=False)
    preemptions: int = field(default=0, init=False)
    state: SequenceState | None = field(default=SequenceState.WAITING, init=False)  # None once finished

    def __post_init__(self) -> None:
        self.total = len(self.token_ids)

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.total += 1

    def output_token_ids(self) -> list[int]:
        """Everything after the prompt, tokens of earlier epochs included."""
        return self.token_ids[self.prompt_tokens :]

    def block_hash(self, index: int, block_size: int) -> int:
        """Chain hash of a full block; computes what is missing up to it."""
        hashes = self.hashes
        if index == len(hashes):  # the common case: decoding just filled one more block
            parent = hashes[-1] if hashes else ROOT
            hashes.append(chain_hash(parent, self.token_ids[index * block_size : (index + 1) * block_size]))
        elif index > len(hashes):
            extend_chain(hashes, self.token_ids, block_size)
        return hashes[index]

    def all_hashes(self, block_size: int) -> list[int]:
        """Chain hashes of all full blocks of the tokens known now."""
        extend_chain(self.hashes, self.token_ids, block_size)
        return self.hashes
