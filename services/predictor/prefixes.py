"""Prompts in an instance's prefix cache, as far as decisions, snapshots and outcomes tell.

| input | conclusion |
|---|---|
| a placement with its prompt's hashes | its blocks will be cached when later sequences are admitted |
| a snapshot that shows it | as many of its blocks are computed as the snapshot says |
| a snapshot without it, or its outcome | its blocks are left there, and what it decoded behind them |
| a snapshot's free blocks | the blocks that were left longest ago are overwritten |
| a migration, with names of what moved | its blocks are cached at the target, and left at the source |
| an outcome with fewer cached tokens than believed | the missing blocks, and all left before them, are gone |

Predicted hits are believed as long as at least half of them came true lately. An engine that claims to cache and does
not, or that names blocks by more than their tokens, is soon judged only by what it shows.
"""

from __future__ import annotations

from collections.abc import Mapping

from millrace.contracts.migration import MigrationFinished
from millrace.contracts.observers import DecisionMade, RequestFinished
from millrace.contracts.sequences import SequenceId
from millrace.contracts.status import StatusSnapshot
from millrace.kvcache.chain import HASH_BYTES, unpack_hashes
from millrace.kvcache.prefix_index import Holding, PrefixIndex

from services.predictor.metrics import PredictorMetrics

#: Sequences that are followed per instance, and their hashes: more than an engine runs and queues of long prompts.
FOLLOWED_MAX, HASHES_MAX = 4_096, 1 << 20

#: Who was never shown, or is shown no more, is followed for so long: its outcome comes within, or never.
FOLLOWED_NS = 5_000_000_000

#: Mean share of a believed hit that has to come true, and how much of the past is forgotten with each outcome: seven
#: in a row that do not come true end the belief.
TRUE_SHARE_MIN, FORGET = 0.5, 0.1


class _Followed:
    """A sequence that was placed here, or moved here.

    Attributes:
        told_ns: When it was last seen, placed or moved.
        brought: Last of the blocks that it came with; None where it was placed.
    """

    __slots__ = ("brought", "count", "gone", "holding", "shown", "told_ns")

    def __init__(self, holding: Holding, told_ns: int, brought: int | None = None) -> None:
        self.brought = brought
        self.holding = holding
        self.count = len(holding.hashes)
        self.told_ns = told_ns
        self.shown = False
        self.gone = False  # from the engine; its outcome may still come


class Prefixes:
    """The prefix cache of one instance, believed.

    Attributes:
        block_size: Of the engine, tokens; hashes of blocks of another size mean nothing here.
    """

    def __init__(self, block_size: int, *, caching: bool, in_order: bool) -> None:
        """Args:
        caching: Whether the engine keeps blocks at all.
        in_order: Whether prompts are computed one after the other, so that a prompt's blocks are there for the next.
        """
        self.block_size = block_size if caching else 0
        self._in_order = in_order
        self._index = PrefixIndex()
        self._followed: dict[str, _Followed] = {}
        self._hashes = 0  # of all that are followed
        self._true_share = 1.0
        self._seen: StatusSnapshot | None = None
        self._waiting: Mapping[str, int] = {}

    def __len__(self) -> int:
        return len(self._index)

    def cached_tokens(self, packed: bytes, block_size: int, tokens: int) -> int:
        """Tokens of a prompt with these hashes that the engine would find, of ``tokens`` that it has to have.

        The last snapshot was seen before.
        """
        if not self._names(packed, block_size) or not self._trusted():
            return 0
        return self._tokens(self._index.find(unpack_hashes(packed), coming=self._in_order), tokens)

    def place(self, sequence: str, placed: DecisionMade, *, at_ns: int) -> int:
        """A sequence was placed here. Returns how many of its tokens are cached."""
        if self._follow_one(sequence, placed.block_hashes, placed.block_size, at_ns) is None:
            return 0
        return self._hits(sequence, placed.prompt_tokens + placed.output_tokens)

    def arrive(self, moved: MigrationFinished, *, at_ns: int) -> None:
        """A sequence moved here, and what it had is in this cache since."""
        followed = self._follow_one(moved.sequence, moved.block_hashes, moved.block_size, at_ns)
        if followed is not None:
            followed.brought = followed.holding.hashes[-1]
            self._index.compute(followed.holding, followed.count)

    def depart(self, moved: MigrationFinished, *, at_ns: int) -> None:
        """A sequence moved away: what it had is left here."""
        named = self._names(moved.block_hashes, moved.block_size)
        hashes = unpack_hashes(moved.block_hashes) if named else ()
        followed = self._followed.get(moved.sequence)
        if followed is None or followed.gone:
            self._index.leave(hashes)
        else:
            self._index.compute(followed.holding, followed.count)
            self._index.release(followed.holding, hashes[followed.count :])
            followed.gone, followed.told_ns = True, at_ns
        if followed is not None:
            followed.brought = None

    def _follow_one(self, sequence: str, packed: bytes, block_size: int, at_ns: int) -> _Followed | None:
        self.drop(sequence)
        count = len(packed) // HASH_BYTES
        if not self._names(packed, block_size) or count > HASHES_MAX:
            return None
        while self._followed and (len(self._followed) >= FOLLOWED_MAX or self._hashes + count > HASHES_MAX):
            self.drop(next(iter(self._followed)))
        holding = self._index.expect(unpack_hashes(packed), coming=self._in_order)
        self._followed[sequence] = followed = _Followed(holding, at_ns)
        self._hashes += count
        return followed

    def _hits(self, sequence: str, tokens: int) -> int:
        """Cached tokens of a sequence that was placed and has to have ``tokens``, as believed when it was placed."""
        followed = self._followed.get(sequence)
        return self._tokens(followed.holding.hits, tokens) if followed is not None and self._trusted() else 0

    def see(self, snapshot: StatusSnapshot) -> Mapping[str, int]:
        """Follows what a snapshot shows. Returns by sequence the cached tokens of those that wait."""
        if snapshot is not self._seen:
            self._seen, self._waiting = snapshot, self._follow(snapshot)
        return self._waiting

    def _follow(self, snapshot: StatusSnapshot) -> dict[str, int]:
        if not self._followed:
            return {}
        for status in snapshot.running:
            followed = self._show(status.sequence, snapshot.at_ns)
            if followed is not None:
                self._index.compute(followed.holding, max(0, status.computed_tokens) // self.block_size)
        waiting: dict[str, int] = {}
        for status in snapshot.waiting:
            if self._show(status.sequence, snapshot.at_ns) is not None and not status.output_tokens:
                waiting[status.sequence] = self._hits(status.sequence, status.prompt_tokens)
        self._leave(snapshot.at_ns)
        self._index.shrink(snapshot.blocks_free)
        return waiting

    def shrink(self, blocks_free: int) -> None:
        """A snapshot came that may never be looked at: what it wrote over is gone all the same."""
        self._index.shrink(blocks_free)

    def end(self, sequence: str, outcome: RequestFinished, further: bytes) -> None:
        """Its request ended. Args: further: hashes of the blocks that it filled by decoding."""
        followed = self._followed.get(sequence)
        if followed is None:
            return
        hashes = _behind(unpack_hashes(further), followed.brought)
        if followed.gone:
            self._index.leave(hashes)
        elif outcome.ttft_ns is not None:
            self._index.compute(followed.holding, len(followed.holding.hashes))
            self._index.release(followed.holding, hashes)
        self.drop(sequence)

    def brought(self, sequence: str) -> bool:
        """Whether a sequence moved here, and not on."""
        followed = self._followed.get(sequence)
        return followed is not None and followed.brought is not None

    def judge(self, sequence: str, cached_tokens: int, prompt_tokens: int) -> int | None:
        """Learns what was found. Returns the cached tokens that were believed; None for a sequence nobody followed."""
        followed = self._followed.get(sequence)
        if followed is None:
            return None
        believed, cached_tokens = self._tokens(followed.holding.hits, prompt_tokens), max(0, cached_tokens)
        if believed:
            self._true_share += FORGET * (min(1.0, cached_tokens / believed) - self._true_share)
        if cached_tokens < believed:
            self._index.disprove(followed.holding, cached_tokens // self.block_size)
        return believed

    def drop(self, sequence: str) -> None:
        """A sequence went elsewhere or is followed no more."""
        followed = self._followed.pop(sequence, None)
        if followed is not None:
            self._hashes -= followed.count
            if not followed.gone:
                self._index.release(followed.holding)

    def _names(self, packed: bytes, block_size: int) -> bool:
        """Whether these are names of blocks of this engine."""
        return len(packed) >= HASH_BYTES and block_size == self.block_size > 0

    def _trusted(self) -> bool:
        return self._true_share >= TRUE_SHARE_MIN

    def _tokens(self, blocks: int, tokens: int) -> int:
        """At least one token is always computed."""
        return max(0, min(blocks, (tokens - 1) // self.block_size)) * self.block_size

    def _show(self, sequence: str, at_ns: int) -> _Followed | None:
        followed = self._followed.get(sequence)
        if followed is not None:
            followed.shown, followed.told_ns = True, at_ns
        return followed

    def _leave(self, at_ns: int) -> None:
        """Those that were shown and are no more left the engine; who is silent for long is not followed any more."""
        for sequence, followed in list(self._followed.items()):
            if followed.told_ns == at_ns:
                continue
            if followed.shown and not followed.gone:
                followed.gone = True
                self._index.release(followed.holding)
            if at_ns - followed.told_ns > FOLLOWED_NS:
                self.drop(sequence)

    def check_invariants(self) -> None:
        assert len(self._followed) <= FOLLOWED_MAX
        assert self._hashes == sum(each.count for each in self._followed.values()) <= HASHES_MAX
        self._index.check_invariants()


def end_request(prefixes: Prefixes, outcome: RequestFinished, metrics: PredictorMetrics) -> None:
    """Note what a request's sequences leave in the prefix cache of one of its instances, and compare the tokens found
    there with those believed.
    """
    stayed = len(outcome.instances) == 1 and not outcome.continuations and not outcome.migrations
    if stayed and outcome.predicted_cached_tokens is not None and outcome.ttft_ns is not None:
        believed = prefixes.judge(f"{outcome.request}.0", outcome.cached_tokens, outcome.prompt_tokens)
        if believed is not None:
            metrics.judge_prefix(believed=believed, found=outcome.cached_tokens)
    for index in range(len(outcome.output_tokens)):
        sequence = str(SequenceId(outcome.request, index))
        whole_here = stayed or prefixes.brought(sequence)
        prefixes.end(sequence, outcome, outcome.block_hashes if index == 0 and whole_here else b"")


def _behind(hashes: tuple[int, ...], block: int | None) -> tuple[int, ...]:
    """Those behind this block; all where it is not among them."""
    return hashes[hashes.index(block) + 1 :] if block in hashes else hashes
