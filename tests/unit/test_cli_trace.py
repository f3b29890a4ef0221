"""Drawing of a request's spans."""

import argparse
from pathlib import Path

import pytest
from millrace.cli import trace
from millrace.cli.errors import CliError
from millrace.cli.trace_reading import attribute, is_request, latest_requests, request_of, spans_of
from millrace.cli.trace_tree import build, draw
from millrace.telemetry.spans import SpanLine, encode_span

MS = 1_000_000
T0 = 1_700_000_000_000 * MS
TRACE = "a" * 32


def span(span_id: str, name: str, start: int, end: int, parent: str = "", **changes: object) -> SpanLine:
    fields: dict[str, object] = {
        "trace": TRACE,
        "span": span_id * 16,
        "parent": parent * 16,
        "name": name,
        "service": "worker",
        "instance": "w0",
        "start_ns": T0 + start * MS,
        "end_ns": T0 + end * MS,
    }
    return SpanLine(**(fields | changes))  # type: ignore[arg-type]


def request_spans() -> list[SpanLine]:
    first = {"millrace.sequence": "r1.0", "millrace.epoch": 0, "millrace.output_tokens": 40}
    second = {"millrace.sequence": "r1.0", "millrace.epoch": 1, "millrace.output_tokens": 87}
    after = {"links": [f"00-{TRACE}-{'4' * 16}-01"], "events": [("first_token", T0 + 510 * MS, {"index": 40})]}
    return [
        span("1", "ingress", 0, 1000, instance="ingress-0", attributes={"millrace.request": "r1"}),
        span("2", "dispatch", 1, 2, "1", instance="ingress-0", attributes={"millrace.reason": "fewest tokens"}),
        span("3", "prefill", 10, 100, "1", attributes=first),
        span("4", "decode", 100, 300, "1", attributes=first, error="engine died"),
        span("5", "decode", 500, 1000, "1", instance="w1", attributes=second, **after),
    ]


def test_the_tree_shows_places_times_reasons_errors_events_and_links() -> None:
    text = "\n".join(draw(request_spans(), width=120))
    assert "1s  5 spans" in text
    assert "├ dispatch" in text
    assert "└ decode" in text
    assert "reason='fewest tokens'" in text
    assert "failed: engine died" in text
    assert "· first_token at +510ms index=40" in text
    assert "↳ goes on from decode on w0 at +100ms" in text
    assert (text.count("output_tokens=40"), text.count("output_tokens=87")) == (1, 1), "phases of an epoch share them"


def attempts(count: int) -> list[SpanLine]:
    return [
        span(
            *("a", "dispatch", 10 * index, 10 * index + 5, "9"),
            span=f"{index:016x}",
            instance="ingress-0",
            error="refused: full",
            attributes={"millrace.sequence": "r1.0", "millrace.epoch": index, "millrace.instance": f"w{index % 2}"},
        )
        for index in range(count)
    ]


def under_a_root(spans: list[SpanLine]) -> list[SpanLine]:
    root = span("9", "ingress", 0, 10_000, instance="ingress-0", attributes={"millrace.request": "r1"})
    return [root, *sorted(spans, key=lambda each: each.start_ns)]


def test_many_attempts_alike_are_folded_into_one_line_with_a_count() -> None:
    lines = draw(under_a_root(attempts(60)), width=120)
    text = "\n".join(lines)
    assert "61 spans" in text
    assert "58 × dispatch" in text
    assert "w1 (29), w0 (29)" in text
    assert text.count("failed: refused: full") == 2
    assert len(lines) < 15


def test_few_attempts_and_those_that_ended_differently_stay_apart() -> None:
    placed = span(
        "7", "dispatch", 900, 905, "9", instance="ingress-0", attributes={"millrace.sequence": "r1.0", "note": "taken"}
    )
    text = "\n".join(draw(under_a_root([*attempts(3), placed]), width=120))
    assert "×" not in text
    assert text.count("dispatch") == 4
    text = "\n".join(draw(under_a_root([*attempts(30), placed]), width=120))
    assert "28 × dispatch" in text
    assert "note=taken" in text


def test_choices_of_one_request_are_told_apart() -> None:
    spans = [
        span(str(index + 1), "decode", 0, 10, attributes={"millrace.sequence": f"r1.{index}"}) for index in range(2)
    ]
    text = "\n".join(draw(spans, width=120))
    assert "decode .0" in text
    assert "decode .1" in text


def test_no_line_is_wider_than_the_screen() -> None:
    spans = request_spans()
    spans[1] = span("2", "dispatch" * 9, 1, 2, "1", instance="i" * 50, attributes={"reason": "because " * 60})
    assert max(map(len, draw(spans, width=80))) <= 80


def test_a_span_whose_parent_is_unknown_is_a_root_and_broken_ids_make_no_loop() -> None:
    roots = build([span("1", "a", 0, 9, parent="f"), span("2", "b", 1, 2, parent="1")])
    assert [(root.span.name, len(root.children)) for root in roots] == [("a", 1)]
    spans = [span("1", "a", 0, 1, parent="2"), span("2", "b", 0, 1, parent="1"), span("3", "c", 0, 1, parent="3")]
    text = "\n".join(draw(spans, width=100))
    assert all(text.count(f"{name} ") for name in "abc")


def write(folder: Path, name: str, spans: list[SpanLine]) -> None:
    (folder / name).write_bytes(b"".join(encode_span(each) + b"\n" for each in spans))


def test_spans_are_found_in_every_file_by_request_sequence_and_trace(tmp_path: Path) -> None:
    spans = request_spans()
    write(tmp_path, "ingress-ingress-0.jsonl", spans[:2])
    write(tmp_path, "worker-w0.jsonl", spans[2:4])
    write(tmp_path, "worker-w1.123.jsonl", spans[4:])
    longer = {"millrace.request": "r12", "millrace.sequence": "r12.0", "millrace.client_id": "mine"}
    write(tmp_path, "ingress-ingress-1.jsonl", [span("9", "ingress", 0, 1, attributes=longer, trace="b" * 32)])
    with open(tmp_path / "worker-w0.jsonl", "ab") as file:
        file.write(encode_span(spans[0])[:50])  # cut off by a kill
    for name in ("r1", "r1.0", TRACE):
        assert [each.span[0] for each in spans_of(tmp_path, name)] == ["1", "2", "3", "4", "5"]
    assert [each.trace for each in spans_of(tmp_path, "mine")] == ["b" * 32], "the client's own id"


@pytest.mark.parametrize(
    "prefix", ["", "chatcmpl-", "cmpl-", "resp_", "msg_", "embd-", "pool-", "classify-", "score-", "rerank-"]
)
def test_a_request_is_named_by_the_id_of_any_answer(prefix: str) -> None:
    assert request_of(f"{prefix}f252e6b438-1a") == "f252e6b438-1a"
    assert is_request(f"{prefix}f252e6b438-1a.0")
    assert not is_request("worker-1")


def test_an_unknown_request_is_told_in_one_sentence(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", request_spans())
    with pytest.raises(CliError, match="nothing is recorded of 'r9'"):
        spans_of(tmp_path, "r9")
    with pytest.raises(CliError, match="no traces are in"):
        spans_of(tmp_path / "none", "r9")


def test_the_list_tells_which_model_of_a_cascade_answered_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {"request": "r1", "model": "auto", "outcome": "completed", "delivered": "mini", "reason": "last_tier"}
    attributes = {f"millrace.{name}": value for name, value in told.items()}
    write(tmp_path, "a.jsonl", [span("1", "ingress", 0, 5, attributes=attributes)])
    assert trace.run(argparse.Namespace(dir=tmp_path, request=None, count=5)) == 0
    assert "model=auto outcome=completed delivered=mini reason=last_tier" in capsys.readouterr().out


def test_the_latest_requests_come_first(tmp_path: Path) -> None:
    roots = [
        span("1", "ingress", index, index + 5, attributes={"millrace.request": f"r{index}"}, trace=f"{index:032x}")
        for index in range(5)
    ]
    write(tmp_path, "a.jsonl", roots)
    assert [attribute(each, "request") for each in latest_requests(tmp_path, 3)] == ["r4", "r3", "r2"]
