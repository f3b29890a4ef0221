"""Replay: a recorded inbox through the actor it came from, and every difference told."""

import json
from pathlib import Path

import pytest
from millrace.actor.recording import Difference, Header, RecordingWriter
from millrace.cli.differences import difference_lines
from millrace.contracts.local import StopRequested, TimerFired
from millrace.contracts.message import Message
from millrace.contracts.tagger import TagRequest

from simulator.__main__ import main
from simulator.recorded_actor import build_actor

T0 = 1_700_000_000_000_000_000
CONFIG = json.dumps({"name": "tagger-7", "bus": {"cluster": "local", "password": "***"}})


def record(path: Path, *, seed: int = 5, recorded_seed: int | None = None, kind: str = "services.tagger.actor") -> None:
    """A tagger's life: start, a question, a heartbeat, the end."""
    actor = build_actor(Header(kind="services.tagger.actor", actor="tagger-7", seed=seed, config=CONFIG))
    written = seed if recorded_seed is None else recorded_seed
    writer = RecordingWriter(path, Header(kind=kind, actor=actor.name, seed=written, config=CONFIG))
    writer.started(T0, actor.start(T0))
    question = TagRequest(request="r1", model="tiny", prompt_tokens=3, max_tokens=9)
    for number, message in enumerate(
        [
            Message(question, "mr.local.tag.tiny", "ingress-0", "_INBOX.1"),
            Message(TimerFired(name="heartbeat")),
            Message(StopRequested()),
        ]
    ):
        now = T0 + number
        writer.handled(now, message, actor.handle(message, now))
    writer.close()


def test_the_same_code_does_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "a.rec")
    assert main(["replay", str(tmp_path / "a.rec"), "--actor", "tagger-7"]) == 0
    assert "4 recorded steps replayed, no differences" in capsys.readouterr().out


def test_a_difference_is_shown_and_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "a.rec", seed=5, recorded_seed=6)  # replayed as another incarnation than it was
    assert main(["replay", str(tmp_path / "a.rec")]) == 1
    text = capsys.readouterr().out
    assert "body.incarnation: 5 → 6" in text
    assert "3 differences in effects" in text


def test_a_recording_of_another_actor_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "a.rec")
    assert main(["replay", str(tmp_path / "a.rec"), "--actor", "w0"]) == 1
    assert "a recording of tagger-7, not w0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("tap", "a recording of the bus"),
        ("os.path", "no service"),
        ("services.nobody.actor", "cannot be replayed"),
        ("services.tagger.actor;import os", "no service"),
    ],
)
def test_only_services_are_imported_for_a_file(
    kind: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "a.rec", kind=kind)
    assert main(["replay", str(tmp_path / "a.rec")]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("payload", [b"", b"nothing of the kind", b"\x00\x00\x00\x01\xc1"])
def test_a_file_that_is_no_recording_is_told_in_one_sentence(
    payload: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.rec").write_bytes(payload)
    assert main(["replay", str(tmp_path / "a.rec")]) == 1
    assert "is no recording" in capsys.readouterr().err


def test_a_missing_file_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path / "none.rec")]) == 1
    assert "there is no file" in capsys.readouterr().err


def difference(recorded: object, replayed: object) -> str:
    return "\n".join(
        difference_lines(
            Difference(frame=3, at_ns=T0, message="TimerFired", index=0, recorded=recorded, replayed=replayed)
        )
    )


def test_only_the_fields_that_differ_are_shown() -> None:
    was = {"type": "Publish", "subject": "a", "body": {"x": 1, "same": 2, "list": [1, 2]}}
    now = {"type": "Publish", "subject": "a", "body": {"x": 5, "same": 2, "list": [1, 3], "new": "y"}}
    assert difference(was, now).splitlines() == [
        "step 3, TimerFired, effect 1: Publish",
        "  body.x: 1 → 5",
        "  body.list[1]: 2 → 3",
        "  body.new: (absent) → 'y'",
    ]


def test_effects_too_many_and_too_few_are_told() -> None:
    assert "not recorded, now {'type': 'Stop'}" in difference(None, {"type": "Stop"})
    assert "recorded {'type': 'Stop'}, now nothing" in difference({"type": "Stop"}, None)
