"""The command itself: verbs, exit codes, which cluster it means."""

import argparse
import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from millrace.cli.__main__ import main
from millrace.cli.cluster import add_connection_options, resolve_connection
from millrace.cli.errors import CliError
from millrace.cli.verbs import VERBS, Verb
from millrace.supervision.cluster_folder import command, find_folder

from simulator import __main__ as simulator

SIMULATOR = [verb for verb in VERBS if verb.program]


def test_verbs_of_another_program_are_the_simulators() -> None:
    assert {verb.name for verb in SIMULATOR} == set(simulator.VERBS)
    assert {verb.program for verb in SIMULATOR} == {"simulator"}


@pytest.mark.parametrize("verb", SIMULATOR, ids=lambda verb: verb.name)
def test_a_verb_of_the_simulator_is_run_by_its_program(verb) -> None:
    command = [sys.executable, "-m", "millrace.cli", verb.name, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert f"usage: millrace {verb.name}" in done.stdout


def test_the_simulator_refuses_an_unknown_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulator.main(["juggle"]) == 2
    assert "usage: python -m simulator {sim,what-if}" in capsys.readouterr().err


def test_the_overview_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(verb.summary in text for verb in VERBS)


@pytest.mark.parametrize(
    "words", [["juggle"], ["tap", "--sideways"], ["up", "--engin", "modelled"], ["trace", "a", "b"]]
)
def test_wrong_usage_ends_with_2_and_one_sentence(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("millrace")
    assert line.endswith("--help`")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["statsu"], "no verb 'statsu' (did you mean status?)"),
        (["up", "--instance", "2"], "unrecognized arguments: --instance 2 (did you mean --instances?)"),
        (["keys", "ad"], "invalid choice: 'ad'"),
    ],
)
def test_wrong_usage_names_what_is_near(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(words) == 2
    assert said in capsys.readouterr().err


def test_ctrl_c_while_a_verb_is_imported_is_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "interrupted_verb.py").write_text("raise KeyboardInterrupt\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("millrace.cli.__main__.VERBS", (Verb("interrupted", "ends", "interrupted_verb"),))
    assert main(["interrupted"]) == 130


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"millrace {version('millrace')}\n"


def exit_code(words: list[str]) -> int:
    """Exit code of a verb, whether argparse ended it or it returned."""
    try:
        return main(words)
    except SystemExit as ended:
        return int(ended.code or 0)


def test_task_runs_every_verb() -> None:
    text = (Path(__file__).resolve().parents[2] / "task").read_text()
    patterns = re.findall(r"^ {4}([a-z |\\\n-]+)\)", text.partition('case "$verb" in')[2], re.MULTILINE)
    assert set(re.findall(r"[a-z-]+", " ".join(patterns))) == {verb.name for verb in VERBS}


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, millrace.cli.__main__ as m\ntry: m.main(['--help'])\nexcept SystemExit: pass\n"
    code += "heavy = {'nats', 'msgspec', 'rich', 'opentelemetry', 'structlog', 'asyncio'} & set(sys.modules)\n"
    code += "sys.exit(str(sorted(heavy)) if heavy else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MILLRACE_DIR", raising=False)
    monkeypatch.setattr("millrace.cli.cluster.running_folders", list)
    return tmp_path


@pytest.mark.parametrize("verb", ["tap", "status"])
def test_without_a_cluster_one_sentence_and_exit_code_1(
    verb: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"millrace {verb}: no cluster runs in this folder or a parent;")
    assert error.count("\n") == 1


def test_a_trace_that_is_not_there_is_exit_code_1(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "r1"]) == 1
    assert "no .millrace folder" in capsys.readouterr().err


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_connection_options(parser)
    return parser.parse_args(words)


def write_cluster(folder: Path, **fields: str) -> None:
    (folder / "run").mkdir(parents=True)
    (folder / "run" / "cluster.json").write_text(json.dumps(fields))


KNOWN = {
    "cluster": "mill",
    "nats_url": "nats://127.0.0.1:4555",
    "observer_user": "observer",
    "observer_password": "secret",
    "something_else": "ignored",
}


def test_the_cluster_file_is_found_from_the_working_directory_upwards(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cluster(elsewhere / ".millrace", **KNOWN)
    (elsewhere / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(elsewhere / "a" / "b")
    found = resolve_connection(options())
    assert (found.cluster, found.url, found.user, found.password) == ("mill", KNOWN["nats_url"], "observer", "secret")


def test_options_win_over_the_file(elsewhere: Path) -> None:
    write_cluster(elsewhere / ".millrace", **KNOWN)
    found = resolve_connection(options("--cluster", "x", "--user", "u", "--password", "p"))
    assert (found.cluster, found.user, found.password) == ("x", "u", "p")


def test_another_server_does_not_get_this_cluster_s_password(elsewhere: Path) -> None:
    write_cluster(elsewhere / ".millrace", **KNOWN)
    found = resolve_connection(options("--nats", "nats://elsewhere:4222"))
    assert (found.user, found.password) == ("", "")


def test_the_folder_can_be_named_by_an_option(elsewhere: Path) -> None:
    write_cluster(elsewhere / "there", **KNOWN)
    assert resolve_connection(options("--dir", str(elsewhere / "there"))).cluster == "mill"
    with pytest.raises(CliError, match=r"no cluster runs in nowhere; start one with `./task up --dir nowhere`"):
        resolve_connection(options("--dir", "nowhere"))


@pytest.mark.parametrize("verb", ["status", "top", "tap", "migrate", "drain", "down", "trace", "explain", "cluster"])
def test_every_verb_about_a_cluster_takes_its_folder(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [verb, "show", "--help"] if verb == "cluster" else [verb, "--help"]
    with pytest.raises(SystemExit):
        main(words)
    assert "--dir DIR" in capsys.readouterr().out


def test_the_folder_can_be_named_in_the_environment(tmp_path: Path) -> None:
    assert find_folder(tmp_path, {"MILLRACE_DIR": "/somewhere"}) == Path("/somewhere")
    assert find_folder(tmp_path, {}) is None or find_folder(tmp_path, {}) != tmp_path / ".millrace"


def test_a_damaged_cluster_file_is_named(elsewhere: Path) -> None:
    (elsewhere / ".millrace" / "run").mkdir(parents=True)
    (elsewhere / ".millrace" / "run" / "cluster.json").write_text("{")
    with pytest.raises(CliError, match=r"cluster\.json cannot be read"):
        resolve_connection(options())


@pytest.mark.parametrize("before", [True, False])
def test_the_key_file_may_be_named_before_or_after_the_action(
    before: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--file", str(tmp_path / "keys.toml")]
    for action in (["add", "alice", "--requests-per-minute", "60"], ["list"], ["remove", "alice"], ["list"]):
        assert main(["keys", *(where + action if before else action + where)]) == 0
    _, listed, none = capsys.readouterr().out.splitlines()
    assert listed == "alice  60 requests per minute"
    assert none.startswith("no keys in ")


def test_a_probe_of_no_url_says_what_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "127.0.0.1:1"]) == 2
    assert capsys.readouterr().err == "millrace probe: 127.0.0.1:1: an http:// or https:// URL is needed\n"


def test_a_hint_names_the_folder_where_a_verb_would_not_find_it(elsewhere: Path) -> None:
    assert command("down", elsewhere / "x") == "millrace down --dir x"
    assert command("down", Path("/some where")) == "millrace down --dir '/some where'"
    (elsewhere / ".millrace").mkdir()
    (elsewhere / "task").touch()
    assert command("down", elsewhere / ".millrace") == "./task down"
    assert command("explain r", elsewhere / "x") == "./task explain r --dir x"


def test_down_without_a_cluster_fails_and_names_those_that_run_elsewhere(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["down"]) == 1
    assert "no cluster runs in this folder or a parent" in capsys.readouterr().err
    monkeypatch.setattr("millrace.cli.cluster.running_folders", lambda: [Path("/far")])
    assert main(["down"]) == 1
    assert capsys.readouterr().err.endswith("running elsewhere on this machine:\n  millrace down --dir /far\n")
