"""All ranks of an engine as one: the engine core's side of kv_rank.py, and the work that is spread over steps."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
from millrace.contracts.kv import UNSUMMED, CopierKind, KvEndpoint

from services.worker.vllm_engine import kv_words
from services.worker.vllm_engine.kv_words import KvAnswer, Offer


class ReadFailed(Exception):
    """A read from a peer failed on some rank; the message says why."""


class Ranks:
    """Asks every rank and joins what they say."""

    def __init__(self, executor: Any, columns: list[int]) -> None:
        """Args: columns: the group of each column of a row."""
        self._executor = executor
        self._columns = columns

    def _ask(self, method: str, *arguments: Any) -> list[Any]:
        answers: list[Any] = self._executor.collective_rpc(method, args=arguments)
        return answers

    def _results(self, method: str, *arguments: Any) -> list[Any]:
        """Raises ReadFailed where a rank could not."""
        answers = self._ask(method, *arguments)
        for failure, _ in answers:
            if failure:
                raise ReadFailed(failure)
        return [result for _, result in answers]

    def offer(self) -> Offer:
        """Every rank's KV; or the first refusal."""
        try:
            offered = self._results("millrace_kv_offer", self._columns)
        except ReadFailed as error:
            return Offer(refusal=str(error))
        kinds = [CopierKind(kind) for kind in offered[0][1] if all(kind in others for _, others in offered)]
        return Offer(ranks=[kv_words.decode_rank(rank) for rank, _ in offered], copiers=kinds)

    def reach(self, peer: KvEndpoint, kinds: Sequence[CopierKind]) -> CopierKind:
        """The first of these that every rank reaches its peer with. Raises ReadFailed: none."""
        peers = msgspec.msgpack.encode(peer.ranks)
        failures: list[str] = []
        for kind in kinds:
            try:
                self._results("millrace_kv_connect", str(kind), peers)
            except ReadFailed as error:
                failures.append(f"{kind}: {error}")
            else:
                return kind
        raise ReadFailed("; ".join(failures) or "no copier in common")

    def checksums(self, rows: Sequence[list[int]]) -> list[list[int]]:
        """Per rank, one per row."""
        return self._ask("millrace_kv_checksums", list(rows))

    def begin(
        self,
        key: str,
        *,
        kind: CopierKind,
        peer: KvEndpoint,
        source_rows: list[list[int]],
        target_rows: list[list[int]],
    ) -> tuple[int, int]:
        """Starts a read of rows into others: bytes and descriptors over all ranks.

        Raises ReadFailed: what some ranks began is ended.
        """
        peers = msgspec.msgpack.encode(peer.ranks)
        try:
            started = self._results("millrace_kv_begin", key, str(kind), peers, source_rows, target_rows)
        except ReadFailed:
            self.cancel(key)
            self._ask("millrace_kv_forget", str(kind), peers)
            raise
        return sum(size for size, _ in started), sum(pieces for _, pieces in started)

    def advance(self, key: str, bytes_max: int) -> bool:
        """Whether every rank is done. Raises ReadFailed: it is over on all."""
        try:
            return all(self._results("millrace_kv_advance", key, bytes_max))
        except ReadFailed:
            self.cancel(key)
            raise

    def cancel(self, key: str) -> None:
        """Ends a read on all ranks."""
        self._ask("millrace_kv_cancel", key)


def settle(answer: Future[bytes], said: KvAnswer) -> None:
    """Gives the answer, unless one was given."""
    if not answer.done():
        answer.set_result(kv_words.encode(said))


class BlockSampler:
    """Choice of the rows that are summed: this share of them, evenly spread."""

    def __init__(self, share: float) -> None:
        self._share, self._owed = share, 0.0

    def take(self, count: int) -> list[bool]:
        """For each of the next so many."""
        taken = []
        for _ in range(count):
            self._owed += self._share
            taken.append(self._owed >= 1)
            self._owed -= taken[-1]
        return taken


class Summing:
    """Checksums of many rows, some per step.

    Attributes:
        sums: Per rank, one per row, UNSUMMED where none was wanted; empty where none was at all.
    """

    def __init__(self, ranks: Ranks, rows: Sequence[list[int]], *, row_bytes: int, wanted: Sequence[bool]) -> None:
        self._ranks, self._rows = ranks, rows
        self._left = [place for place, want in enumerate(wanted) if want]
        self._row_bytes = row_bytes
        self.sums: list[list[int]] = []

    def advance(self, bytes_max: int) -> bool:
        """Whether all are there."""
        count = max(1, bytes_max // self._row_bytes)
        now, self._left = self._left[:count], self._left[count:]
        if now:
            made = self._ranks.checksums([self._rows[place] for place in now])
            self.sums = self.sums or [[UNSUMMED] * len(self._rows) for _ in made]
            for sums, new in zip(self.sums, made, strict=True):
                for place, value in zip(now, new, strict=True):
                    sums[place] = value
        return not self._left
