"""Finds a request's spans in the files of `.millrace/traces/`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from millrace.cli.errors import CliError
from millrace.telemetry.spans import SpanLine, decode_span

#: Of each file, the list of latest requests looks at this many bytes from its end.
TAIL_BYTES = 4 * 1024 * 1024

#: Spans of one request that are read; n=128 with continuations stays far below.
SPANS_MAX = 10_000


#: In the API's ids: which endpoint answered.
_ENDPOINT = re.compile(r"^(chatcmpl-|cmpl-|resp_|msg_|embd-|pool-|classify-|score-|rerank-)")

#: Ids that ingress gives, and those of traces.
_GIVEN = re.compile(r"[0-9a-f]{10}-[0-9a-f]+(\.\d+)?|[0-9a-f]{32}")


def request_of(name: str) -> str:
    """The request id in an id of the API."""
    return _ENDPOINT.sub("", name)


def is_request(name: str) -> bool:
    """Whether a name can only be a request's, or a trace's: no instance and no model looks so."""
    return _GIVEN.fullmatch(request_of(name)) is not None


def attribute(span: SpanLine, name: str) -> Any:
    """An attribute by its short name; services write it with or without ``millrace.`` in front."""
    return span.attributes.get(f"millrace.{name}", span.attributes.get(name))


def spans_of(folder: Path, request: str) -> list[SpanLine]:
    """Every span of the traces that a request, one of its sequences, or a trace id names; sorted by start.

    Raises:
        CliError: nothing of that name was recorded.
    """
    files = trace_files(folder)
    traces = {request} if _is_trace_id(request) else _traces_naming(files, request)
    if not traces:
        raise CliError(
            f"nothing is recorded of {request!r} in {folder}; it may not have ended yet or only just now, may not have "
            "been sampled (telemetry.trace_sample), or be so old that its file was deleted; `millrace trace` lists the "
            "latest ones"
        )
    needles = [trace.encode() for trace in traces]
    found: dict[tuple[str, str], SpanLine] = {}
    for span in _spans_with(files, needles):
        if span.trace in traces and len(found) < SPANS_MAX:
            found[(span.trace, span.span)] = span
    if not found:
        raise CliError(f"no span of trace {request} is recorded in {folder}")
    return sorted(found.values(), key=lambda span: (span.start_ns, -span.end_ns, span.name))


def latest_requests(folder: Path, count: int) -> list[SpanLine]:
    """The newest root spans that name a request, newest first."""
    roots: dict[str, SpanLine] = {}
    for file in trace_files(folder):
        for span in filter(None, map(decode_span, _tail(file))):
            if attribute(span, "request") and (not span.parent or span.name == "ingress"):
                roots[span.trace] = span
    return sorted(roots.values(), key=lambda root: -root.start_ns)[:count]


def trace_files(folder: Path) -> list[Path]:
    """The files, newest first.

    Raises:
        CliError: there is no such folder, or nothing in it.
    """
    try:
        files = sorted(folder.glob("*.jsonl"), key=lambda file: -file.stat().st_mtime)
    except FileNotFoundError:  # one was rotated away while we looked
        files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise CliError(f"no traces are in {folder}; with an OTLP endpoint configured they are in its collector instead")
    return files


def _traces_naming(files: Iterable[Path], request: str) -> set[str]:
    return {span.trace for span in _spans_with(files, [request.encode()]) if _names(span, request)}


def _names(span: SpanLine, request: str) -> bool:
    if request in (attribute(span, "request"), attribute(span, "client_id")):
        return True
    sequence = str(attribute(span, "sequence") or "")
    return sequence == request or sequence.startswith(request + ".")


def _spans_with(files: Iterable[Path], needles: list[bytes]) -> Iterator[SpanLine]:
    for file in files:
        try:
            with open(file, "rb") as lines:
                for line in lines:
                    if any(needle in line for needle in needles) and (span := decode_span(line)):
                        yield span
        except FileNotFoundError:
            continue


def _tail(file: Path) -> list[bytes]:
    try:
        with open(file, "rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - TAIL_BYTES))
            lines = stream.read().splitlines()
    except FileNotFoundError:
        return []
    return lines if size <= TAIL_BYTES else lines[1:]


def _is_trace_id(text: str) -> bool:
    return len(text) == 32 and all(character in "0123456789abcdef" for character in text)
