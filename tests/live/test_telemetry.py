"""Telemetry with real files, threads and sockets: it neither blocks nor loses silently."""

import http.server
import json
import random
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from millrace.actor.config import TelemetryConfig
from millrace.actor.effects import Log, RecordSpan
from millrace.telemetry import Telemetry, open_telemetry
from millrace.telemetry.outbox import Outbox
from millrace.telemetry.spans import decode_span
from millrace.telemetry.trace_files import TraceFiles
from millrace.telemetry.tracecontext import format_traceparent, new_trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

RNG = random.Random(5)


def span(index: int = 0, **changes: object) -> RecordSpan:
    fields: dict[str, object] = {
        "name": "decode",
        "traceparent": format_traceparent(new_trace(RNG, sampled=True)),
        "parent_span_id": "",
        "start_ns": 1_000 + index,
        "end_ns": 2_000 + index,
        "attributes": {"index": index},
    }
    return RecordSpan(**(fields | changes))  # type: ignore[arg-type]


class Collector:
    """An OTLP/HTTP receiver that keeps what it gets, or refuses it."""

    def __init__(self, status: int = 200) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @property
    def spans(self) -> list[object]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_service_instance_actor_request_and_trace(tmp_path: Path) -> None:
    log = tmp_path / "deep" / "log.jsonl"
    telemetry = open_telemetry("ingress", "ingress-0", TelemetryConfig(log_format="json", log_file=str(log)))
    context = new_trace(RNG, sampled=True)
    telemetry.log(
        "broker-0",
        Log(
            level="warning",
            event="sequence_lost",
            fields={"event": "clash", "at": 5},
            request="r1",
            traceparent=format_traceparent(context),
        ),
    )
    telemetry.close()
    (line,) = lines_of(log)
    assert line.pop("time")
    assert line == {
        "level": "warning",
        "event": "sequence_lost",
        "service": "ingress",
        "instance": "ingress-0",
        "actor": "broker-0",
        "request": "r1",
        "trace": context.trace_id,
        "event_": "clash",
        "at": 5,
    }


def test_two_telemetries_in_one_process_do_not_mix(tmp_path: Path) -> None:
    opened = []
    for name, form, level in (("a", "json", "info"), ("b", "console", "error")):
        config = TelemetryConfig(log_format=form, log_level=level, log_file=str(tmp_path / name))
        opened.append(open_telemetry("worker", name, config))
    for telemetry in opened:
        telemetry.logger.info("told", by="shell")
        telemetry.log("x", Log(level="error", event="failed"))
        telemetry.close()
    assert [line["event"] for line in lines_of(tmp_path / "a")] == ["told", "failed"]
    text = (tmp_path / "b").read_text()
    assert "told" not in text
    assert "failed" in text
    assert "\x1b" not in text


def test_a_line_is_bounded_however_large_its_fields_are(tmp_path: Path) -> None:
    config = TelemetryConfig(log_format="json", log_file=str(tmp_path / "log"))
    telemetry = open_telemetry("worker", "w0", config)
    telemetry.log("w0", Log(level="info", event="huge", fields={"prompt": "é" * 1_000_000}))
    telemetry.close()
    text = (tmp_path / "log").read_bytes()
    assert len(text) < 17_000
    assert text.endswith(b" ... cut\n")


@pytest.mark.parametrize("changes", [{"log_level": "loud"}, {"log_format": "xml"}])
def test_a_wrong_configuration_is_refused_with_its_value(changes: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"loud|xml"):
        open_telemetry("worker", "w0", TelemetryConfig(**changes))  # type: ignore[arg-type]


def test_spans_become_lines_of_a_file_of_their_service_and_broken_ones_are_counted(tmp_path: Path) -> None:
    telemetry = open_telemetry("worker", "w/0", TelemetryConfig(trace_dir=str(tmp_path / "traces")))
    for index in range(3):
        telemetry.span("w/0", span(index))
    telemetry.span("w/0", span(traceparent="not-a-context"))
    assert telemetry.flush()
    spans = [decode_span(line) for line in (tmp_path / "traces" / "worker-w_0.jsonl").read_bytes().splitlines()]
    assert [each.attributes["index"] for each in spans if each] == [0, 1, 2]
    assert telemetry.registry.get_sample_value("millrace_malformed_spans_total") == 1
    telemetry.close()


def test_spans_reach_a_collector_with_ids_links_and_resource(collector: Collector) -> None:
    telemetry = open_telemetry("worker", "w0", TelemetryConfig(otlp_endpoint=collector.url))
    given = span(error="died", links=[format_traceparent(new_trace(RNG, sampled=True))])
    telemetry.span("w0", given)
    telemetry.close()
    (request,) = collector.requests
    attributes = {item.key: item.value.string_value for item in request.resource_spans[0].resource.attributes}
    assert attributes["service.name"] == "worker"
    assert attributes["service.instance.id"] == "w0"
    sent = request.resource_spans[0].scope_spans[0].spans[0]
    assert sent.trace_id.hex() == given.traceparent[3:35]
    assert sent.span_id.hex() == given.traceparent[36:52]
    assert sent.start_time_unix_nano == 1_000
    assert len(sent.links) == 1
    assert sent.status.message == "died"


def test_a_burst_reaches_a_collector_whole(collector: Collector) -> None:
    telemetry = open_telemetry("worker", "w0", TelemetryConfig(otlp_endpoint=collector.url))
    for index in range(5_000):
        telemetry.span("w0", span(index))
    assert telemetry.flush(timeout_s=60)
    telemetry.close()
    assert len(collector.spans) == 5_000


def test_what_a_collector_refuses_is_counted() -> None:
    refusing = Collector(status=400)
    telemetry = open_telemetry("worker", "w0", TelemetryConfig(otlp_endpoint=refusing.url))
    telemetry.span("w0", span())
    telemetry.close()
    refusing.close()
    assert telemetry.registry.get_sample_value("millrace_telemetry_dropped_total", {"sink": "spans"}) == 1


def test_an_outbox_drops_and_counts_when_its_sink_hangs() -> None:
    release = threading.Event()
    delivered: list[int] = []

    def deliver(batch: list[int]) -> None:
        release.wait(10)
        delivered.extend(batch)

    outbox = Outbox("test", deliver, items_max=10, batch_max=1)
    taken = sum(outbox.put(index) for index in range(100))
    assert taken <= 11  # ten that wait, and the one that is being delivered
    assert outbox.dropped == 100 - taken
    release.set()
    outbox.close(10)
    assert delivered == list(range(taken))


def test_an_outbox_that_is_flushed_or_closed_does_not_wait_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.telemetry.outbox.GATHER_S", 3_600)
    delivered: list[int] = []
    box = Outbox("test", delivered.extend, items_max=10, batch_max=10)
    for index in range(3):
        box.put(index)
        assert box.flush(10)
    box.put(3)
    box.close(10)
    assert delivered == [0, 1, 2, 3]


def test_an_outbox_outlives_a_sink_that_fails() -> None:
    delivered: list[int] = []

    def deliver(batch: list[int]) -> None:
        if not outbox.dropped:
            raise OSError("disk full")
        delivered.extend(batch)

    outbox = Outbox("test", deliver, items_max=10, batch_max=1)
    outbox.put(1)
    assert outbox.flush(10)
    outbox.put(2)
    outbox.close(10)
    assert (outbox.dropped, delivered) == (1, [2])


def test_full_trace_files_rotate_and_old_ones_go(tmp_path: Path) -> None:
    stranger = tmp_path / "ingress-live.jsonl"
    stranger.write_bytes(b"x" * 300)  # another process writes to it: never deleted while it is fresh
    files = TraceFiles(tmp_path, "worker-w0", file_bytes_max=1_000, folder_bytes_max=5_000)
    for index in range(200):
        files.write([f"{index:099d}".encode()])
    files.close()
    assert stranger.exists()
    total = sum(file.stat().st_size for file in tmp_path.glob("*.jsonl"))
    assert total <= 5_000 + 1_000  # the folder's bound, and the file that is being written
    rotated = sorted(tmp_path.glob("worker-w0.*.jsonl"))
    last = [line for file in [*rotated, files.path] if file.exists() for line in file.read_bytes().splitlines()]
    assert [int(line) for line in last] == list(range(200))[-len(last) :]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Telemetry]:
    telemetry = open_telemetry("worker", "w0", TelemetryConfig(log_file=str(tmp_path / "log")))
    yield telemetry
    telemetry.close()


def test_the_metrics_endpoint_serves_this_service_alone(served: Telemetry) -> None:
    assert served.serve_metrics() == 0  # the configuration names no port
    port = served.serve_metrics_on(0)
    served.log("w0", Log(level="info", event="told"))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
        text = response.read().decode()
    assert 'millrace_service_info{instance="w0",service="worker"' in text
    assert 'millrace_log_lines_total{level="info"} 1.0' in text
    assert "process_resident_memory_bytes" in text
