"""Verdicts of the container deployment's check on what it hears; the check itself is `./task test:compose`."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from millrace.telemetry.otlp import readable_span
from millrace.telemetry.spans import SpanLine
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource

from compose.check.calls import Failed, call
from compose.check.collector import lines
from compose.check.moves import CONVERSATION, show_conversation, what_is_wrong

TRACE = "1" * 32


def _span(number: int, parent: int, name: str, **attributes: Any) -> SpanLine:
    return SpanLine(
        trace=TRACE,
        span=f"{number:016x}",
        parent=f"{parent:016x}" if parent else "",
        name=name,
        service="migrator",
        instance="migrator-0",
        actor="migrator-0",
        start_ns=number,
        end_ns=100,
        attributes={f"millrace.{key}": value for key, value in attributes.items()},
        events=[("round", 5, {"bytes": 7})] if name == "migration" else [],
        error="broken" if name == "broken" else "",
    )


def _move(number: int, source: str, target: str) -> list[SpanLine]:
    return [_span(number, 1, "migration", outcome="moved", source=source, target=target)]


THERE_AND_BACK = [_span(1, 0, "ingress"), *_move(2, "a", "b"), *_move(4, "b", "a")]


def test_the_stand_in_keeps_spans_as_their_service_recorded_them() -> None:
    recorded = [
        _span(1, 0, "ingress", tokens=3, share=0.5, cached=True),
        _span(2, 1, "migration"),
        _span(3, 1, "broken"),
    ]
    resource = Resource({"service.name": "migrator", "service.instance.id": "migrator-0"})
    sent = encode_spans([readable_span(line, resource) for line in recorded])
    assert list(lines(sent)) == recorded


def test_one_tree_with_a_move_there_and_back_is_right() -> None:
    assert what_is_wrong(THERE_AND_BACK) == ""


@pytest.mark.parametrize(
    ("spans", "wrong"),
    [
        ([*THERE_AND_BACK, _span(9, 8, "decode")], "2 roots"),
        (THERE_AND_BACK[:2], "migrations"),
        ([THERE_AND_BACK[0], *_move(2, "a", "b"), *_move(4, "a", "b")], "migrations"),
    ],
    ids=["a span without its parent", "no way back", "twice the same way"],
)
def test_any_other_tree_is_refused(spans: list[SpanLine], wrong: str) -> None:
    assert wrong in what_is_wrong(spans)


def _heard(kinds: tuple[str, ...]) -> list[str]:
    return [
        f"10:00:00.000 subject sender → {kind} r1.0 {'to whoever' if kind == 'MigrateSequence' else '~abcdef more'}"
        for kind in kinds
    ]


def test_a_conversation_is_whole_only_with_each_of_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    show_conversation(_heard(CONVERSATION), "r1")
    assert len(capsys.readouterr().out.splitlines()) == len(CONVERSATION)
    for missing in CONVERSATION:
        with pytest.raises(Failed, match=missing if missing != "MigrationFinished" else "no end"):
            show_conversation(_heard(tuple(kind for kind in CONVERSATION if kind != missing)), "r1")


def test_a_command_that_fails_is_told_without_its_password() -> None:
    with pytest.raises(Failed, match=r"-c import sys; sys\.exit\(3\) migrate ended with 3") as failed:
        call([sys.executable, "-c", "import sys; sys.exit(3)", "migrate", "--password=secret"])
    assert "secret" not in str(failed.value)
