"""Recordings of a cluster's load: what was asked of it and when, what came of each request, what its engines did. No
text, no tokens, no hashes: of a prompt only how many of its blocks begin like an earlier request's.

A recording is a file of JSON lines (``.gz``: compressed), or a folder of such files, the *segments*, of which the
oldest are removed. Each segment begins with a ``began`` row and with the instances that were there.

| row | what |
|---|---|
| ``began`` | the run of the coordinator that wrote what follows, and the cluster's file |
| ``instance`` | an instance that registered itself: the configuration of its scheduler |
| ``request`` | a request that ended |
| ``steps`` | what an engine computed in about a second while it was busy |
"""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec

from millrace.contracts.status import InstanceRecord
from millrace.workloads.shape import Arrival, AskedRequest, RequestShape, WorkloadError

#: Ending of a segment. Its name is the time at which it began, unix ms.
SUFFIX = ".jsonl.gz"

#: A segment ends after this time, ns, or with so many bytes; with those that are kept the last hour is there, unless
#: it takes over 64 MiB, about a million requests.
SEGMENT_NS = 600_000_000_000
SEGMENT_BYTES = 8 * 1024 * 1024
SEGMENTS_KEPT = 8


#: Fewer requests tell no tail of latencies: no settings are advised from them.
ADVISED_MIN = 200

#: Share of requests that end within the time of a slow one.
SLOW = 0.95

#: Steps of so long before what is replayed are read, too: at high rates too few come meanwhile to fit their times.
EARLIER_NS = 60_000_000_000


class _Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="row"):
    """One line."""


class RecordingBegan(_Row, frozen=True, kw_only=True, tag="began"):
    """First row of each segment.

    Attributes:
        run: Which run of the writer; numbers of requests are its own. Unix ns of its start.
        cluster: The cluster's file, TOML; empty where it is not known.
        origin: What wrote it, or the format that it was imported from.
    """

    run: int
    cluster: str = ""
    origin: str = ""
    version: int = 1


class InstanceSeen(_Row, frozen=True, kw_only=True, tag="instance"):
    """A registered instance."""

    record: InstanceRecord


class RequestServed(_Row, frozen=True, kw_only=True, tag="request"):
    """One request that ended, however it did.

    Attributes:
        number: Within the run, from 0.
        at_ns: Arrival, unix ns.
        prompt: Tokens.
        outputs: Tokens of each choice.
        max_tokens: The client's bound; 0 where unknown.
        ttft_ns, e2e_ns: From arrival; -1 where there was none, or it is not known.
        placed_ns: From arrival to the first placement.
        cached: Prompt tokens found in the prefix cache.
        expected: Output tokens that were expected at the placement; None if unknown.
        instance: The one that it ended at.
        moves: Migrations and continuations.
        block_size: Of the blocks that the next two fields count, tokens; 0 where they are not known.
        like: Number of the request that the prompt begins like; -1 for none.
        shared: So many blocks of both are equal.
    """

    number: int
    at_ns: int
    prompt: int
    outputs: tuple[int, ...]
    model: str = ""
    max_tokens: int = 0
    outcome: str = "completed"
    ttft_ns: int = -1
    e2e_ns: int = -1
    placed_ns: int = 0
    cached: int = 0
    expected: float | None = None
    instance: str = ""
    policy: str = ""
    moves: int = 0
    block_size: int = 0
    like: int = -1
    shared: int = 0

    @property
    def tpot_ns(self) -> float:
        """Mean time per output token after the first; nan where there is none."""
        rest = max(self.outputs, default=0) - 1
        return (self.e2e_ns - self.ttft_ns) / rest if rest > 0 and self.ttft_ns >= 0 else float("nan")


class StepsComputed(_Row, frozen=True, kw_only=True, tag="steps"):
    """Work of an engine in an interval. Sums, as in EngineTotals.

    Attributes:
        at_ns: End of the interval, unix ns.
        wall_ns: Between summaries of which both had a running batch the time between them, pauses between steps
            included; else the time in steps.
        waiting: Sequences in the queue at the end.
        preemptions: Since the row before.
    """

    instance: str
    at_ns: int
    wall_ns: int
    steps: int
    decodes: int = 0
    prefill_tokens: int = 0
    context_tokens: int = 0
    waiting: int = 0
    preemptions: int = 0


RecordingRow = RecordingBegan | InstanceSeen | RequestServed | StepsComputed

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[RecordingRow] = msgspec.json.Decoder(RecordingRow)


class RecordedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A recording, read.

    Attributes:
        began: Of the last run.
        instances: By name, as they last registered.
        requests: With the run of each, in order of arrival.
        steps: In order of time; where the load is to be replayed, with those of EARLIER_NS before it.
        lead: The first so many came before the window that is asked for, and were under way when it began: no figures
            are taken of them.
        earlier: Those that came before the first of ``requests``, for which some of ``steps`` were computed.
    """

    began: RecordingBegan
    instances: dict[str, InstanceRecord]
    requests: list[tuple[int, RequestServed]]
    steps: list[StepsComputed]
    lead: int = 0
    earlier: tuple[RequestServed, ...] = ()

    @property
    def half(self) -> int:
        """Place of the first request of the window's second half."""
        return (self.lead + len(self.requests)) // 2

    def rows(self) -> Iterator[RecordingRow]:
        """All rows, as one recording of one run: numbers of requests are their places."""
        yield self.began
        yield from (InstanceSeen(record=record) for record in self.instances.values())
        yield from self.steps
        places = {(run, row.number): place for place, (run, row) in enumerate(self.requests)}
        for (run, _), (place, row) in zip(self.requests, enumerate(row for _, row in self.requests), strict=True):
            like = places.get((run, row.like), -1)
            shared = row.shared if like >= 0 else 0
            yield msgspec.structs.replace(row, number=place, like=like, shared=shared)

    def arrivals(self) -> list[Arrival]:
        """The requests as a workload, from the first one on."""
        chains = _Chains()
        first_ns = self.requests[0][1].at_ns if self.requests else 0
        return [Arrival(row.at_ns - first_ns, *_asked(row, chains.prefix(run, row))) for run, row in self.requests]


def _asked(row: RequestServed, prefix: tuple[int, ...]) -> tuple[RequestShape, AskedRequest]:
    shape = RequestShape(row.prompt, max(1, *row.outputs, 0), prefix, row.block_size if prefix else 0)
    outputs = tuple(max(1, tokens) for tokens in row.outputs) or (1,)
    return shape, AskedRequest(row.model, outputs, row.max_tokens, row.expected)


class _Chains:
    """Names of prompts' blocks: equal where a request begins like another."""

    def __init__(self) -> None:
        self._chains: dict[tuple[int, int], list[int]] = {}
        self._next = 0

    def prefix(self, run: int, row: RequestServed) -> tuple[int, ...]:
        """Names of the row's blocks; empty where they are not known."""
        if not row.block_size:
            return ()
        count = -(-row.prompt // row.block_size)
        known = self._chain((run, row.like), row.shared)[: row.shared] if row.like >= 0 else []
        own = self._chains[run, row.number] = list(known)
        self._extend(own, count)
        return tuple(own)

    def _chain(self, key: tuple[int, int], count: int) -> list[int]:
        """At least so many names; a request's output follows its prompt, and one that is not here has names too."""
        chain = self._chains.setdefault(key, [])
        self._extend(chain, count)
        return chain

    def _extend(self, chain: list[int], count: int) -> None:
        missing = max(0, count - len(chain))
        chain += range(self._next, self._next + missing)
        self._next += missing


def read_recording(path: Path, *, last_s: float = 0.0, requests_max: int = 0, latest: bool = False) -> RecordedLoad:
    """A recording.

    Args:
        path: A file, or a folder of segments.
        last_s: Only requests that arrived within so many seconds before the last one; 0 for all.
        requests_max: Only the last so many; 0 for all.
        latest: Only what the cluster did since its file last changed, to be replayed: with requests that may have been
            under way before that, and of a folder, to which a cluster may write, without those that came so late that
            slow ones have not ended, if ADVISED_MIN others are left.

    Raises:
        WorkloadError: it cannot be read, has a wrong row, or no request.
    """
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    began = RecordingBegan(run=0)
    instances: dict[str, InstanceRecord] = {}
    requests: dict[tuple[int, int], RequestServed] = {}
    former: dict[tuple[int, int], RequestServed] = {}
    steps: list[StepsComputed] = []
    for file in files:
        for row in _rows(file):
            match row:
                case RecordingBegan():
                    if latest and row.cluster != began.cluster:
                        former |= requests
                        requests.clear()
                        steps.clear()
                        instances.clear()  # each segment names its own
                    began = row
                case InstanceSeen():
                    instances[row.record.instance] = row.record
                case RequestServed():
                    requests[began.run, row.number] = row
                case StepsComputed():
                    steps.append(row)
    if not requests:
        raise WorkloadError("holds no request that ended", path=path)
    arrived, slow_ns = _arrived(requests), slow_request_ns(requests.values()) if latest else 0
    if latest and path.is_dir():
        ended_ns = max(row.at_ns + max(0, row.e2e_ns) for _, row in arrived)
        settled = [each for each in arrived if each[1].at_ns <= ended_ns - slow_ns]
        arrived = settled if len(settled) >= ADVISED_MIN else arrived
    since_ns = arrived[-1][1].at_ns - int(last_s * 1e9) if last_s else 0
    kept = [each for each in arrived[-requests_max:] if each[1].at_ns >= since_ns]
    first_ns = kept[0][1].at_ns
    begin_ns = first_ns - 2 * slow_ns
    earlier_ns = begin_ns - (EARLIER_NS if latest else 0)
    lead = [each for each in _arrived(former | requests) if begin_ns <= each[1].at_ns < first_ns]
    return RecordedLoad(
        began=began,
        instances=instances,
        requests=lead + kept,
        steps=sorted((row for row in steps if row.at_ns >= earlier_ns), key=lambda row: row.at_ns),
        lead=len(lead),
        earlier=tuple(row for _, row in arrived if earlier_ns <= row.at_ns < begin_ns),
    )


def _arrived(requests: Mapping[tuple[int, int], RequestServed]) -> list[tuple[int, RequestServed]]:
    """With the run of each, in order of arrival."""
    return sorted(((run, row) for (run, _), row in requests.items()), key=lambda each: each[1].at_ns)


def slow_request_ns(requests: Iterable[RequestServed]) -> int:
    """End-to-end time of a slow request; 0 where none is known."""
    times = sorted(row.e2e_ns for row in requests if row.e2e_ns >= 0)
    return times[int(SLOW * (len(times) - 1))] if times else 0


def _rows(file: Path) -> Iterator[RecordingRow]:
    """Rows of a file; one that a killed process left ends where it does."""
    line = 0
    try:
        with _opened(file) as lines:
            for line, text in enumerate(lines, 1):  # noqa: B007  # an error names it
                if text.endswith(b"\n"):
                    yield _decoder.decode(text)
    except EOFError:
        return  # the compressed stream has no end yet
    except OSError as error:
        raise WorkloadError(f"cannot be read: {error.strerror or error}", path=file) from None
    except msgspec.DecodeError as error:
        raise WorkloadError(f"is no row of a recording: {error}", path=file, line=line) from None


def _opened(file: Path) -> io.BufferedIOBase:
    return gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb")


def _created(path: Path) -> IO[bytes]:
    """A new file for its owner alone."""
    return open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600))


def write_recording(path: Path, rows: Iterable[RecordingRow]) -> int:
    """Writes a recording to one file, compressed where its name says so; returns the number of rows.

    Raises:
        OSError: it cannot be written.
    """
    lines = [_encoder.encode(row) + b"\n" for row in rows]
    content = b"".join(lines)
    with _created(path) as file:
        file.write(gzip.compress(content) if path.suffix == ".gz" else content)
    return len(lines)


class RecordingFolder:
    """Appends rows to one writer's segments of a folder and removes the oldest of them."""

    def __init__(self, folder: Path, began: RecordingBegan, writer: str = "") -> None:
        """``writer``: name of the process, where several write to the folder."""
        self._folder = folder
        self._suffix = f"-{writer}{SUFFIX}" if writer else SUFFIX
        self._began = began
        self._instances: dict[str, InstanceSeen] = {}
        self._segment: gzip.GzipFile | None = None
        self._file: IO[bytes] | None = None
        self._opened_ns = 0

    def on_cluster(self, cluster: str) -> None:
        """The cluster's file from now on: another one begins a segment."""
        if cluster != self._began.cluster:
            self._began = msgspec.structs.replace(self._began, cluster=cluster)
            self.close()

    def append(self, rows: Sequence[RecordingRow], now_ns: int) -> None:
        """Writes rows so that a kill loses none of them.

        Raises:
            OSError: they cannot be written.
        """
        self._instances |= {row.record.instance: row for row in rows if isinstance(row, InstanceSeen)}
        if self._file is None or now_ns - self._opened_ns > SEGMENT_NS or self._file.tell() > SEGMENT_BYTES:
            self.close()
            self._open(now_ns)
        assert self._segment is not None
        self._write(rows)

    def _open(self, now_ns: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for old in sorted(self._folder.glob(f"*{self._suffix}"))[: -(SEGMENTS_KEPT - 1)]:
            old.unlink(missing_ok=True)
        self._file = _created(self._folder / f"{now_ns // 1_000_000}{self._suffix}")
        self._segment = gzip.GzipFile(fileobj=self._file, mode="wb", filename="")
        self._opened_ns = now_ns
        self._write([self._began, *self._instances.values()])

    def _write(self, rows: Sequence[RecordingRow]) -> None:
        assert self._segment is not None
        assert self._file is not None
        self._segment.write(b"".join(_encoder.encode(row) + b"\n" for row in rows))
        self._segment.flush()
        self._file.flush()

    def close(self) -> None:
        segment, file, self._segment, self._file = self._segment, self._file, None, None
        if segment is not None and file is not None:
            segment.close()
            file.close()


def rows_of(arrivals: Sequence[Arrival], *, origin: str) -> Iterator[RecordingRow]:
    """A trace as a recording. Prompts that begin with the same named parts are alike."""
    yield RecordingBegan(run=0, origin=origin)
    first: dict[int, int] = {}
    for number, arrival in enumerate(arrivals):
        shape, asked = arrival.shape, arrival.asked
        shared = next((i for i, name in enumerate(shape.prefix) if name not in first), len(shape.prefix))
        like = first[shape.prefix[shared - 1]] if shared else -1
        for name in shape.prefix[shared:]:
            first[name] = number
        yield RequestServed(
            number=number,
            at_ns=arrival.at_ns,
            prompt=shape.prompt_tokens,
            outputs=(shape.output_tokens,) if asked is None else asked.outputs,
            model="" if asked is None else asked.model,
            block_size=shape.prefix_tokens,
            like=like,
            shared=shared,
        )
