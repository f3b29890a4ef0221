"""Cost of a span and of a log line: on the emitting thread, and for the whole process with the thread behind it.

Each case emits bursts and waits for its sink after each, so that nothing is dropped; cases take turns, and the median
over all turns counts. *emit* is CPU time of the emitting thread, *wall* is what passes for it (the sink's thread wants
the interpreter too), *process* is CPU time of both threads. The OTLP receiver is a process of its own. Building the
effect itself is in every case, so the ratio is to the same effect given to a sink that discards it.
"""

from __future__ import annotations

import argparse
import http.server
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from millrace.actor.config import TelemetryConfig
from millrace.actor.effects import Log, RecordSpan
from millrace.actor.ports import NullTelemetry, TelemetrySink
from millrace.telemetry import Telemetry, open_telemetry
from millrace.telemetry.tracecontext import child, format_traceparent, new_trace, parse_traceparent

ATTRIBUTES = {
    "request": "chatcmpl-0123456789abcdef01234567",
    "sequence": "chatcmpl-0123456789abcdef01234567.0",
    "instance": "w0",
    "epoch": 0,
    "prompt_tokens": 523,
    "output_tokens": 127,
    "outcome": "stop",
}

#: Nanoseconds of (emitting thread's CPU, wall, process CPU) per call.
Cost = tuple[float, float, float]


class _Receiver(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def _receive(ready: Connection) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Receiver)
    ready.send(server.server_port)
    server.serve_forever()


class Case:
    """One way to emit, with the sink behind it."""

    def __init__(self, name: str, sink: TelemetrySink, emit: Callable[[TelemetrySink, int], None]) -> None:
        self.name = name
        self.sink = sink
        self.emit = emit
        self.costs: list[Cost] = []

    def burst(self, calls: int) -> None:
        """Emits ``calls`` times, waits for the sink, and keeps the cost of one."""
        emit, sink = self.emit, self.sink
        process, wall, thread = time.process_time_ns(), time.perf_counter_ns(), time.thread_time_ns()
        for index in range(calls):
            emit(sink, index)
        thread, wall = time.thread_time_ns() - thread, time.perf_counter_ns() - wall
        if isinstance(sink, Telemetry) and not sink.flush(60):
            raise TimeoutError(f"{self.name}: the sink did not keep up")
        process = time.process_time_ns() - process
        self.costs.append((thread / calls, wall / calls, process / calls))

    def median(self) -> Cost:
        """Median of each figure, nanoseconds."""
        emit, wall, process = zip(*self.costs, strict=True)
        return statistics.median(emit), statistics.median(wall), statistics.median(process)


def emitters(seed: int) -> tuple[Callable[[TelemetrySink, int], None], ...]:
    """Return the cases: a sampled span, a span of an unsampled trace, a log line, a line below the level."""
    rng = random.Random(seed)
    root = new_trace(rng, sampled=True)
    unsampled = format_traceparent(new_trace(rng, sampled=False))

    def span(sink: TelemetrySink, index: int) -> None:
        context = format_traceparent(child(root, rng))
        effect = RecordSpan(
            name="decode",
            traceparent=context,
            parent_span_id=root.span_id,
            start_ns=index,
            end_ns=index + 1,
            attributes=ATTRIBUTES,
        )
        sink.span("w0", effect)

    def not_sampled(sink: TelemetrySink, index: int) -> None:
        context = parse_traceparent(unsampled)
        if context is not None and context.sampled:
            raise AssertionError("this trace is not sampled")

    def line(sink: TelemetrySink, index: int) -> None:
        sink.log("w0", Log(level="info", event="sequence_finished", fields=ATTRIBUTES, traceparent=unsampled))

    def quiet_line(sink: TelemetrySink, index: int) -> None:
        sink.log("w0", Log(level="debug", event="sequence_finished", fields=ATTRIBUTES, traceparent=unsampled))

    return span, not_sampled, line, quiet_line


def run(folder: Path, otlp: str, *, calls: int, turns: int, seed: int) -> list[Case]:
    """Measures every case."""
    span, not_sampled, line, quiet_line = emitters(seed)

    def opened(name: str, **fields: str) -> Telemetry:
        config = TelemetryConfig(log_file=str(folder / f"{name}.log"), **fields)  # type: ignore[arg-type]
        return open_telemetry("worker", name, config)

    files = opened("files", trace_dir=str(folder / "traces"), log_format="json")
    collector = opened("otlp", otlp_endpoint=otlp)
    console = opened("console", log_format="console")
    null = NullTelemetry()
    cases = [
        Case("span, discarded", null, span),
        Case("span, trace not sampled", null, not_sampled),
        Case("span, sampled, JSON lines", files, span),
        Case("span, sampled, OTLP", collector, span),
        Case("log line, discarded", null, line),
        Case("log line, below the level", files, quiet_line),
        Case("log line, JSON", files, line),
        Case("log line, console", console, line),
    ]
    for turn in range(turns + 1):
        for case in cases:
            case.burst(calls)
            if turn == 0:
                case.costs.clear()  # warming up
    for telemetry in (files, collector, console):
        dropped = [
            sample.value
            for family in telemetry.registry.collect()
            for sample in family.samples
            if sample.name == "millrace_telemetry_dropped_total"
        ]
        if any(dropped):
            raise AssertionError(f"dropped: {dropped}; the figures would flatter")
        telemetry.close()
    return cases


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2_000, help="calls per burst")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    here, there = multiprocessing.Pipe()
    receiver = multiprocessing.get_context("spawn").Process(target=_receive, args=(there,), daemon=True)
    receiver.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            url = f"http://127.0.0.1:{here.recv()}"
            cases = run(Path(folder), url, calls=arguments.calls, turns=arguments.turns, seed=arguments.seed)
    finally:
        receiver.terminate()
        receiver.join(10)
    print(f"seed {arguments.seed}, {arguments.turns} turns of {arguments.calls} calls; µs per call\n")
    print(f"{'':<28}{'emit':>8}{'wall':>8}{'process':>9}{'emit ratio':>12}")
    for case in cases:
        base = next(each for each in cases if each.name == f"{case.name.split(',')[0]}, discarded").median()
        emit, wall, process = (each / 1000 for each in case.median())
        print(f"{case.name:<28}{emit:>8.2f}{wall:>8.2f}{process:>9.2f}{emit * 1000 / base[0]:>12.2f}")
    return 0
