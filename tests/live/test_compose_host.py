"""The compose provisioner's shell against a stand-in for docker compose: a script that keeps containers as files."""

import signal
from pathlib import Path
from typing import Any

import pytest
from millrace.actor.deps import ActorDeps, actor_rng
from millrace.actor.errors import ConfigError

from services.supervisor.compose_host import ComposeHostConfig, ComposeShell, build_host
from services.supervisor.config import ChildSpec
from services.supervisor.effects import ChildExited, ChildStarted, SignalChild, StartChild
from tests.testbed.waiting import until

#: `up`, `wait`, `kill` and `ps` as compose has them: a file per running service; what stopped it is its status.
STAND_IN = """#!/bin/sh
folder="$1"; verb="$2"
for service in "$@"; do :; done
echo "$*" >> "$folder/calls"
case "$verb" in
  up) [ "$service" = broken ] && { echo "no such image"; exit 17; }; touch "$folder/$service.up" ;;
  wait) while [ -e "$folder/$service.up" ]; do sleep 0.02; done; exit "$(cat "$folder/$service.status")" ;;
  kill) case "$4" in SIGTERM) echo 0 ;; *) echo 137 ;; esac > "$folder/$service.status"; rm "$folder/$service.up" ;;
  ps) for file in "$folder"/*.up; do [ -e "$file" ] && basename "$file" .up; done; exit 0 ;;
esac
"""


class Ear:
    """Stands for the actor's handle."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def deliver(self, body: Any) -> None:
        self.heard.append(body)


@pytest.fixture
def config(tmp_path: Path) -> ComposeHostConfig:
    script = tmp_path / "compose"
    script.write_text(STAND_IN)
    script.chmod(0o700)
    return ComposeHostConfig(model="m", compose=[str(script), str(tmp_path)], services=["a", "b", "broken"])


def start(name: str) -> StartChild:
    return StartChild(spec=ChildSpec(name=name, role="worker", presences=[name]))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGKILL, 137)])
async def test_a_service_is_started_signalled_and_its_end_is_heard(
    config: ComposeHostConfig, tmp_path: Path, number: int, status: int
) -> None:
    shell, ear = ComposeShell(config), Ear()
    shell.attach(ear)  # type: ignore[arg-type]
    shell.start(start("a"))
    await until(lambda: ear.heard)
    assert ear.heard == [ChildStarted(name="a", pid=1)]
    shell.signal(SignalChild(name="a", pid=1, signal=number))
    await until(lambda: len(ear.heard) == 2)
    assert ear.heard[1] == ChildExited(name="a", pid=1, status=status)
    calls = (tmp_path / "calls").read_text()
    assert f"{tmp_path} up --detach --no-deps a\n" in calls
    assert f"{tmp_path} kill --signal {signal.Signals(number).name} a\n" in calls


async def test_one_that_cannot_be_started_ends_with_what_docker_said(config: ComposeHostConfig) -> None:
    shell, ear = ComposeShell(config), Ear()
    shell.attach(ear)  # type: ignore[arg-type]
    shell.start(start("broken"))
    await until(lambda: ear.heard)
    assert ear.heard == [ChildExited(name="broken", pid=0, status=17, detail="no such image")]


async def test_what_runs_already_is_taken_over(config: ComposeHostConfig, tmp_path: Path) -> None:
    (tmp_path / "b.up").touch()
    shell, ear = ComposeShell(config), Ear()
    assert shell.running == {"b": 1}
    actor = build_host(config, ActorDeps(incarnation=1_000, rng=actor_rng(config.name, 1_000)), shell.running)
    assert {name: child["state"] for name, child in actor.snapshot().items()} == {"b": "ready"}
    shell.attach(ear)  # type: ignore[arg-type]
    shell.signal(SignalChild(name="b", pid=1, signal=signal.SIGTERM))
    await until(lambda: ear.heard)
    assert ear.heard == [ChildExited(name="b", pid=1, status=0)]


@pytest.mark.parametrize("compose", [["/nowhere/docker", "compose"], ["false"]])
def test_without_docker_it_does_not_start(compose: list[str]) -> None:
    with pytest.raises(ConfigError, match="compose: "):
        ComposeShell(ComposeHostConfig(model="m", compose=compose, services=["a"]))
