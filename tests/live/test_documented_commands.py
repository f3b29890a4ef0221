"""Every command that the README and the guides show is run, or is listed here with what runs it instead."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from millrace.cli import up
from millrace.cli.cluster_flags import cluster_of

from compose.check.moves import lines_of, of_type, show_conversation
from deployment.config_check import check_files
from services.supervisor.config import LaunchOptions
from services.supervisor.layout import Layout
from tests.testbed.programs import output_of
from tests.testbed.up_cluster import UpRig, prompt_text

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md")))

#: What a command may take, seconds, whatever else this machine does.
LIMIT_S = 180.0

#: A line of code: indented, or within a fence. A fence that is no shell shows files or messages.
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^((\./task|millrace|curl|hf|cd|docker|helm|kubectl|nats|pip(-audit)?|python -m) |/srv/|\.venv/)")
COMMENT = re.compile(r"\s{2,}# .*$")

#: What a document lets its reader fill in, and what a cluster of this test has other names for.
PLACEHOLDERS = {"INSTANCE": "worker-1", "MODEL": "millrace-mini", "llama": "millrace-mini", "worker-2": "worker-1"}

#: Pattern of a command that this test does not run -> who runs it, or what it needs.
ELSEWHERE = {
    r"\./task (test|check|fmt|setup|lock|bench)\b.*": "CI and whoever works on the code",
    r"\./task wheels|pip install .*|millrace up .*/srv/models/llama": "tests/live/test_wheel.py",
    r"kubectl .*|helm .*": "need a control plane; tests/unit/test_kubernetes_manifests.py renders the chart",
    r"pip-audit .*": "needs a service of advisories: a user's CI",
    r"nats sub .*": "needs NATS' command line; tests/live/test_nats_permissions.py: what its user may hear",
    r"/srv/millrace-.*": "tests/live/test_supervisor_death.py",
    r"millrace service .*": "tests/live/test_systemd.py",
    r"\./task kubernetes:prepare .*": "tests/unit/test_kubernetes_manifests.py, tests/live/test_kubernetes_pods.py",
    r"millrace apply .*": "tests/live/test_apply.py, tests/live/test_join.py (--set)",
    r"millrace certs .*|millrace up .*nats.tls=certs": "tests/live/test_bus_tls.py, tests/live/test_join.py (--host)",
    r"millrace join .*": "tests/live/test_join.py",
    r".*hf download .*": "needs a model hub; tests/unit/test_cli_cluster_flags.py: models in the hub's cache",
    r"\./task compose:prepare .*|docker .*|cd compose .*": "needs docker: ./task test:compose",
    r"python -m bench .*": "minutes: tests/unit/test_bench_*.py",
    r"\./task up": "real engines: tests/engine",
    r"millrace profile models/.*": "real engines: tests/engine/test_profile_vllm.py",
    r"millrace selftest.*": "needs a GPU; with modelled engines: tests/live/test_selftest.py",
    r"millrace scale .* --shape .*": "needs a GPU; tests/unit/test_scaling_by_order.py",
    r"millrace sim .*considerate\.py.*": "tests/sim/test_scenarios.py",
    r"millrace what-if --(advise|(rate x2|set .*round_robin) .*)": "tests/sim/test_what_if_replays.py",
    r"millrace tap 'migrat.*'": "test_a_tap_tells_the_whole_story_of_a_move",
    r".*--sweep .*|.*--seeds .*": "minutes: tests/unit/test_cli_sim.py, tests/sim",
    r"(?!millrace cluster show).*\b(FILE|NAME|DIR|nano\.toml|cluster\.toml|cascade\.toml)\b.*": "needs a file",
    r"curl .*_lora_adapter.*": "needs an adapter: tests/live/test_ingress_adapters.py",
    r"millrace drain .* --force": "ends the model's last instance: tests/unit/test_cli_orders.py",
}


def shell_lines(text: str) -> Iterator[str]:
    """Lines of code that may be commands; those continued by a backslash as one."""
    fenced = [body for language, body in FENCE.findall(text) if language in ("", "sh", "bash", "console")]
    indented = [line[4:] for line in FENCE.sub("", text).splitlines() if line.startswith("    ")]
    yield from "\n".join([*indented, *fenced]).replace("\\\n", " ").splitlines()


def documented() -> list[tuple[str, str]]:
    """(document, command) of every command shown, without its comment."""
    found = dict.fromkeys(
        (document, COMMENT.sub("", line).strip())
        for document in DOCUMENTS
        for line in shell_lines((ROOT / document).read_text())
        if COMMAND.match(line.strip())
    )
    return list(found)


def elsewhere(command: str) -> str:
    """Reason for not running it here; empty if it is run."""
    return next((why for pattern, why in ELSEWHERE.items() if re.fullmatch(pattern, command)), "")


def with_names(command: str) -> str:
    for name, value in PLACEHOLDERS.items():
        command = re.sub(rf"\b{name}\b", value, command)
    return command


RUN = [(document, command) for document, command in documented() if not elsewhere(command)]
COMMANDS = tuple(dict.fromkeys(command for _, command in RUN))
UP = [command for command in COMMANDS if re.match(r"(\./task|millrace) up ", command)]
SIM = [command for command in COMMANDS if re.match(r"(\./task|millrace) (sim|profile|train) ", command)]
REST = list(dict.fromkeys(with_names(command) for command in COMMANDS if command not in {*UP, *SIM}))


def words_of(command: str) -> list[str]:
    """Words of a `millrace` command; what a redirection would take is printed."""
    return shlex.split(command.split(" > ", maxsplit=1)[0])[1:]


class Busy:
    """A request that streams all the time, so that there is one to look at and to move; ``count`` have begun."""

    def __init__(self, rig: UpRig) -> None:
        self.rig = rig
        self.count = 0
        self.stopping = False
        self.thread = threading.Thread(target=self._stream)
        self.thread.start()

    def _stream(self) -> None:
        body = {"model": self.rig.model, "prompt": prompt_text(1), "max_tokens": 450, "ignore_eos": True}
        while not self.stopping:
            self.count += 1
            headers = {"x-request-id": f"busy-{self.count}"}
            httpx.post(f"{self.rig.url}/v1/completions", json=body, headers=headers, timeout=60).raise_for_status()

    def request(self, *, running: bool) -> str:
        """The client's id of the request that runs, or of one that has ended, whose spans are written."""
        while self.count < (1 if running else 2):
            time.sleep(0.05)
        return f"busy-{self.count if running else 1}"

    def wait_until_recorded(self) -> None:
        """Until a request that ended is in the recording, which is written each second."""
        deadline_s = time.monotonic() + 60
        while verb(self.rig, "recording", "show")[0] and time.monotonic() < deadline_s:
            time.sleep(0.5)

    def stop(self) -> None:
        self.stopping = True
        self.thread.join()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpRig]:
    words = ("--engine", "modelled", "--instances", "4", "--instances-max", "5", "--set", "worker.modelled.speed=0.2")
    with UpRig.of_words(tmp_path_factory.mktemp("documented"), words, model="millrace-mini") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def busy(rig: UpRig) -> Iterator[Busy]:
    load = Busy(rig)
    yield load
    load.stop()


def test_nats_server_leaves_most_cores_to_the_others(rig: UpRig) -> None:
    server = next(each for each in rig.processes() if "".join(each.cmdline()[:1]).endswith("nats-server"))
    assert server.environ()["GOMAXPROCS"] == str(max(1, len(os.sched_getaffinity(0)) // 4))


def filled_in(command: str, busy: Busy) -> str:
    command = command.replace("127.0.0.1:8000", f"127.0.0.1:{busy.rig.port}")
    if "REQUEST" in command:
        command = command.replace("REQUEST", busy.request(running="migrate" in command))
    return command


@pytest.mark.parametrize("command", REST)
def test_a_command_against_a_running_cluster_does_what_it_says(busy: Busy, command: str) -> None:
    command = filled_in(command, busy)
    if command.startswith(".venv/bin/python examples/load.py"):
        words = ["examples/load.py", "--url", busy.rig.url, "--model", busy.rig.model, "--seconds", "2", "--rate", "4"]
        done = subprocess.run(
            [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=90, check=True
        )
        assert re.search(r"(\d+) requests, \1 answered", done.stdout)
        return
    if command.startswith("curl"):
        done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0
        assert "choices" in done.stdout, done.stdout + done.stderr
        return
    words, began_s = words_of(command), time.monotonic()
    words = [
        str(busy.rig.folder / word) if word.endswith((".jsonl.gz", ".png", "changed.toml")) else word for word in words
    ]
    if "--back" in words:
        verb(busy.rig, "drain", words[1])
    if words[0] in ("recording", "what-if"):
        busy.wait_until_recorded()
    more = {"tap": ["--count", "1"], "scale": ["--detach"], "what-if": ["--last", "10", "--jobs", "1"]}.get(
        words[0], []
    )
    status, output = verb(busy.rig, *words, *more)
    while words[0] == "migrate" and status and time.monotonic() < began_s + 60:  # it ended, or is there already
        words[1] = busy.request(running=True)
        verb(busy.rig, "migrate", words[1], "--to", "worker-0")
        status, output = verb(busy.rig, *words)
    assert status == 0, f"{command}: {output}"
    if words[0] == "drain" and not {"--back", "--keep"} & set(words):
        assert verb(busy.rig, *words, "--back")[0] == 0


def test_each_order_of_these_is_a_line_that_says_who_gave_it_and_when(rig: UpRig) -> None:
    log = rig.folder / "run" / "orders.log"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    given = {line["what"] for line in lines if line["who"].startswith("millrace-cli/")}
    assert {"MigrateSequence", "StopInstance", "EvacuateInstance", "StartInstance", "SetInstances"} <= given
    assert ("coordinator-0", "StopInstance") in {(line["who"], line["what"]) for line in lines}
    assert all(datetime.fromisoformat(line["time"]) <= datetime.now(UTC) for line in lines)


def test_a_tap_tells_the_whole_story_of_a_move(busy: Busy) -> None:
    environment, heard = os.environ | {"MILLRACE_DIR": str(busy.rig.folder)}, busy.rig.folder / "tap.txt"
    until_s = time.monotonic() + 60
    with heard.open("wb") as lines:
        tap = subprocess.Popen([sys.executable, "-m", "millrace.cli", "tap", ">"], env=environment, stdout=lines)
    while not heard.stat().st_size and time.monotonic() < until_s:
        time.sleep(0.1)
    while verb(busy.rig, "migrate", busy.request(running=True))[0] and time.monotonic() < until_s:
        pass
    while not (ended := of_type("MigrationFinished", lines_of(heard))) and time.monotonic() < until_s:
        time.sleep(0.1)
    tap.terminate()
    tap.wait(timeout=30)
    show_conversation(lines_of(heard), ended[0].split(" → ")[1].split()[1].partition(".")[0])


def verb(rig: UpRig, *words: str) -> tuple[int, str]:
    environment = os.environ | {"MILLRACE_DIR": str(rig.folder), "COLUMNS": "160"}
    return output_of("millrace.cli", words, environment=environment, limit_s=LIMIT_S)


@pytest.mark.parametrize("command", UP)
def test_every_service_of_a_documented_cluster_takes_its_configuration(tmp_path: Path, command: str) -> None:
    parser = argparse.ArgumentParser()
    up.add_arguments(parser)
    spec = cluster_of(parser.parse_args(words_of(command)[1:]), cores=2)
    layout = Layout(LaunchOptions(spec=spec, directory=str(tmp_path), cores=[0, 1]))
    layout.plan()
    layout.write()
    check_files(layout.spec, layout.configurations())


@pytest.mark.parametrize("command", SIM)
def test_a_simulation_runs_as_documented(tmp_path: Path, command: str) -> None:
    words = [str(tmp_path / word) if word in ("out/", "check.toml") else word for word in words_of(command)]
    if words[0] == "sim":
        words += ["--set", "workload.count=40", "--set", "workload.warm_up=0"]
    status, output = output_of("millrace.cli", words, environment=dict(os.environ), limit_s=LIMIT_S)
    assert status == 0, output


def test_every_rule_of_what_runs_elsewhere_is_used() -> None:
    commands = [command for _, command in documented()]
    assert not [pattern for pattern in ELSEWHERE if not any(re.fullmatch(pattern, command) for command in commands)]
    assert shutil.which("curl")
