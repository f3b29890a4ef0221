"""The wheel, installed into an environment of its own, runs a cluster in an empty folder without the repository.

That of the compiled parts is built, installed and used where `./task test:compose` builds images (compose/Dockerfile).
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.live.ingress_rig import write_model_folder
from tests.testbed.up_cluster import free_port

ROOT = Path(__file__).resolve().parents[2]

#: Folders of the repository whose files a wheel holds.
PACKAGES = ("libs/millrace", "services", "simulator", "deployment", "papers")

LIMIT_S = 300.0


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation")
    pip = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(pip, check=True, timeout=LIMIT_S)
    (made,) = folder.glob("millrace-*.whl")
    return made


class Installed:
    """An environment that holds the wheel, and sees the packages that it needs where they lie already.

    Attributes:
        folder: An empty one, in which its programs run.
    """

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder / "empty"
        self.folder.mkdir()
        self._bin = folder / "environment" / "bin"
        venv.create(folder / "environment", with_pip=False, symlinks=True)
        options = ("--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", str(wheel))
        pip = [sys.executable, "-m", "pip", "--python", str(self._bin / "python"), "install", *options]
        subprocess.run(pip, check=True, timeout=LIMIT_S)
        # Searched last; that folder's own .pth files, the editable install's, are not read.
        (site,) = (folder / "environment" / "lib").glob("python*/site-packages")
        (site / "needed.pth").write_text(sysconfig.get_path("purelib"))
        (self._bin / "nats-server").symlink_to(Path(sys.executable).parent / "nats-server")

    def run(self, program: str, *words: str) -> str:
        """Output of a program that must end with status 0."""
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MILLRACE_DIR")}
        done = subprocess.run(
            [self._bin / program, *words],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"), wheel)


@pytest.fixture(scope="module")
def url(installed: Installed) -> Iterator[str]:
    """The API of a cluster of modelled engines, its model given by path, with the page beside it."""
    model, port = write_model_folder(installed.folder.parent / "model"), free_port()
    words = ("--engine", "modelled", "--instances", "2", "--model", str(model), "--served-name", "m")
    ports = ("--port", str(port), "--nats-port", str(free_port()), "--set", "page.port=0")
    installed.run("millrace", "up", "--detach", *words, *ports)
    yield f"http://127.0.0.1:{port}"
    installed.run("millrace", "down")


def test_the_wheel_holds_every_file_of_its_packages(wheel: Path) -> None:
    command = ["git", "ls-files", *PACKAGES]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    renamed = {line.removeprefix("libs/") for line in listed.stdout.splitlines()}
    assert renamed - set(zipfile.ZipFile(wheel).namelist()) == set()


def test_a_chat_is_answered_and_the_command_line_sees_the_cluster(installed: Installed, url: str) -> None:
    asked = {"model": "m", "messages": [{"role": "user", "content": "a b"}], "max_tokens": 3}
    answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 3
    assert "2 of 2 ready" in installed.run("millrace", "status")
    assert "kvcopy" in installed.run("millrace", "doctor")
