"""The containers of generated Kubernetes manifests serve a cluster, and a worker's pod that ends loses no stream."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from compose import kubernetes
from tests.live.ingress_rig import write_model_folder
from tests.testbed import pods

ROOT = Path(__file__).resolve().parents[2]

CLUSTER = """
[[models]]
name = "m"
path = "model"
[[models.groups]]
engine = "modelled"
count = 2
processes = 2
"""

NAMESPACES = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child"]


def test_pods_that_start_in_any_order_serve_and_one_that_ends_moves_its_streams_away(tmp_path: Path) -> None:
    if not shutil.which("ip") or subprocess.run([*NAMESPACES, "true"], check=False, capture_output=True).returncode:
        pytest.skip("namespaces of one's own are not allowed here, or there is no `ip`")
    model = write_model_folder(tmp_path / "model")
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    assert kubernetes.main(["--cluster", str(tmp_path / "cluster.toml"), "--out", str(tmp_path / "out")]) == 0
    programs = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT / 'libs'}:{ROOT}"}
    command = [*NAMESPACES, sys.executable, "-m", "tests.testbed.pods", tmp_path / "out/manifests.yaml", model]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["healthy"], found["nats"], found["chat_tokens"]) == (200, 0, 3)
    assert found["ended"] == [0, 0]
    assert found["streams"] == [[pods.TOKENS, "length", ""]] * pods.STREAMS
    assert [line for line in found["moved"] if 'outcome="moved"' in line and float(line.split()[1])], found
    assert not found["recomputed"], found
