"""The command itself: verbs, exit codes, which cluster it means."""

import argparse
import json
import re
import shutil
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


def test_verbs_of_another_program_are_the_simulators_and_run_there() -> None:
    others = {verb.name: verb.program for verb in VERBS if verb.program}
    assert others == dict.fromkeys(simulator.VERBS, "simulator")
    command = [sys.executable, "-m", "millrace.cli", "sim", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: millrace sim" in done.stdout


def test_the_overview_names_every_verb_and_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(verb.summary in text for verb in VERBS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"millrace {version('millrace')}\n"


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
        (["recording", "show", "--last", "-5"], "argument --last: -5 is not 0 or more"),
        (["recording", "show", "--last", "nan"], "argument --last: nan is not 0 or more"),
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


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["status"], "millrace status: no cluster runs in this folder or a parent;"),
        (["cluster", "show"], "millrace cluster: no cluster runs in this folder or a parent;"),
        (["trace", "r1"], "millrace trace: no .millrace folder"),
    ],
)
def test_without_a_cluster_one_sentence_and_exit_code_1(
    words: list[str], error: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 1
    said = capsys.readouterr().err
    assert said.startswith(error)
    assert said.count("\n") == 1


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


def test_the_cluster_file_is_found_upwards_and_options_win_over_it(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cluster(elsewhere / ".millrace", **KNOWN)
    (elsewhere / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(elsewhere / "a" / "b")
    found = resolve_connection(options())
    assert (found.cluster, found.url, found.user, found.password) == ("mill", KNOWN["nats_url"], "observer", "secret")
    given = resolve_connection(options("--cluster", "x", "--user", "u", "--password", "p"))
    assert (given.cluster, given.user, given.password) == ("x", "u", "p")
    stranger = resolve_connection(options("--nats", "nats://elsewhere:4222"))
    assert (stranger.user, stranger.password) == ("", ""), "it does not get this cluster's password"


def test_the_folder_can_be_named_by_an_option_or_in_the_environment(elsewhere: Path) -> None:
    write_cluster(elsewhere / "there", **KNOWN)
    assert resolve_connection(options("--dir", str(elsewhere / "there"))).cluster == "mill"
    assert find_folder(elsewhere, {"MILLRACE_DIR": "/somewhere"}) == Path("/somewhere")
    with pytest.raises(CliError, match=r"no cluster runs in nowhere; start one with `./task up --dir nowhere`"):
        resolve_connection(options("--dir", "nowhere"))


@pytest.mark.parametrize("verb", ["status", "top", "tap", "migrate", "drain", "down", "trace", "explain", "cluster"])
def test_every_verb_about_a_cluster_takes_its_folder(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [verb, "show", "--help"] if verb == "cluster" else [verb, "--help"]
    with pytest.raises(SystemExit):
        main(words)
    assert "--dir DIR" in capsys.readouterr().out


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
    monkeypatch.setattr("millrace.cli.cluster.running_folders", lambda: [Path("/far")])
    assert main(["down"]) == 1
    assert capsys.readouterr().err.endswith("running elsewhere on this machine:\n  millrace down --dir /far\n")


# the unit that keeps a cluster up


def _install(folder: Path, *words: str, action: str = "install") -> int:
    return main(["service", "--unit-dir", str(folder), action, "--engine", "modelled", *words])


def test_a_unit_starts_what_up_would_and_leaves_engines_to_the_next_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    unit = tmp_path / "units" / "millrace.service"
    words = ["--dir", "100% mine", "--set", "worker.modelled.speed=2"]
    assert _install(unit.parent, *words, action="show") == 0
    shown = capsys.readouterr().out
    assert not unit.exists()
    assert _install(unit.parent, *words) == 0
    assert shown == unit.read_text()
    lines = unit.read_text().splitlines()
    start = next(line for line in lines if line.startswith("ExecStart="))
    assert start.endswith('"up" "--engine" "modelled" "--dir" "100%% mine" "--set" "worker.modelled.speed=2"')
    assert {"KillMode=process", "RestartPreventExitStatus=0 SIGTERM", f"WorkingDirectory={tmp_path}"} <= set(lines)
    assert "daemon-reload" in capsys.readouterr().out
    if analyze := shutil.which("systemd-analyze"):
        done = subprocess.run([analyze, "verify", unit], capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, [line for line in done.stderr.splitlines() if "millrace" in line]) == (0, [])


@pytest.mark.parametrize("words", [["--detach"], ["--instances", "0"]])
def test_what_up_could_not_run_as_a_unit_is_refused(tmp_path: Path, words: list[str]) -> None:
    assert _install(tmp_path / "units", *words) != 0
    assert not (tmp_path / "units").exists()
