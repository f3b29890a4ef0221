"""Files of their owner alone, and files that are replaced as one step."""

import stat
from pathlib import Path

import pytest
from millrace.files import open_private, replace_file
from millrace.telemetry.trace_files import TraceFiles


def mode(path: Path) -> str:
    return oct(stat.S_IMODE(path.stat().st_mode))


@pytest.mark.parametrize("kind", ["ab", "wb"])
def test_a_private_file_is_its_owners_alone_whatever_it_was_before(tmp_path: Path, kind: str) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_bytes(b"before")
    old.chmod(0o644)
    for path in (new, old):
        with open_private(path, kind) as file:  # type: ignore[arg-type]
            file.write(b"x")
        assert mode(path) == "0o600"
    assert old.read_bytes() == (b"beforex" if kind == "ab" else b"x")


def test_traces_are_private(tmp_path: Path) -> None:
    traces = TraceFiles(tmp_path / "traces", "worker-0")
    traces.write([b"{}\n"])
    traces.close()
    assert [mode(path) for path in (tmp_path / "traces").iterdir()] == ["0o600"]


def test_a_file_is_replaced_and_nothing_else_is_left_in_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "made" / "here.json"
    for content in (b"long before", b"now"):
        replace_file(path, content)
    with path.open("rb") as reading:
        replace_file(path, b"later", private=True)
        assert reading.read() == b"now"
    assert (path.read_bytes(), mode(path), list(path.parent.iterdir())) == (b"later", "0o600", [path])
